def use_level(level: int) -> int: ...
def openmp() -> int: ...

class Matrix:
    def __init__(
        self,
        kind: int,
        weight: int,
        scale_kind: int,
        scale: int,
        bias_kind: int,
        bias: int,
        outputs: int,
        inputs: int,
        group: int,
    ) -> None: ...
    def product(self, hidden: int, num_rows: int, result: int, num_threads: int) -> None: ...

class Layer:
    def __init__(
        self,
        attention_norm: tuple[int, int, int, bool, float],
        feed_forward_norm: tuple[int, int, int, bool, float],
        joint: Matrix,
        output: Matrix,
        gate: Matrix | None,
        inner: Matrix,
        outer: Matrix,
        activation: int,
        num_key_heads: int,
        group: int,
        head_size: int,
    ) -> None: ...
    def run(
        self,
        hidden: int,
        num_rows: int,
        width: int,
        cache_kind: int,
        keys: int,
        values: int,
        capacity: int,
        length: int,
        places: int,
        mask: int,
        mask_of_row: int,
        mask_of_branch: int,
        cosines: int,
        sines: int,
        num_pairs: int,
        is_interleaved: bool,
        num_threads: int,
    ) -> None: ...
