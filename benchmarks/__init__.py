"""Measuring tools that only a checkout has, and under results/ what they wrote."""
