def is_supported() -> bool: ...
def is_threaded() -> bool: ...
def product(
    hidden: int,
    num_rows: int,
    weight: int,
    scale: int,
    bias: int,
    outputs: int,
    inputs: int,
    result: int,
    num_threads: int,
) -> None: ...
