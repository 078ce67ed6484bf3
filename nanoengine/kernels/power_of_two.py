"""power_of_two: the sizes of Triton's tiles."""


def power_of_two(least: int) -> int:
    """The smallest one that is `least` or more. Triton's own function takes 5 us, as kernels may
    call it, and a step launches hundreds of them.
    """
    return 1 << max(0, least - 1).bit_length()
