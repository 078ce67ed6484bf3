"""Measuring tools of a checkout (not in the wheel); results/ holds what they measured."""
