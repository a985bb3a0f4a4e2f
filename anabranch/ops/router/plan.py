"""What the few-token router was made for, and how the other one is cut. Nothing here needs a GPU."""

from dataclasses import dataclass

from anabranch.config.model import MoeConfig

FEW_TOKENS = 8  # up to here the router is one launch
NORMED_TOKENS = 4  # and up to here the norm joins it: a step of 6 or 8 tokens is 0.6 % faster with both apart
MOST_WIDTH, MOST_EXPERTS, MOST_CHOICES = 8192, 1024, 32
NARROW_WIDTH, NARROW_EXPERTS = 4096, 256  # what the narrower kernels take
SEGMENT = 256  # columns of a row that are summed on their own
SPLIT_TOKENS = 128  # up to here every segment has its own program


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitTile:
    """One program's share of the logits, in which no bit shows: T tokens by R experts, K columns a product.

    With two products a segment a turn of the loop is a segment, with more it is a product.
    """

    T: int
    R: int = 64  # the least that wgmma takes
    K: int = SEGMENT // 2
    warps: int = 4
    stages: int = 2

    def programs(self, tokens: int, experts: int) -> int:
        """Programs of one segment, or of all where one program sums them."""
        return -(-tokens // self.T) * -(-experts // self.R)


_NARROW, _MIDDLE = LogitTile(T=32, stages=3), LogitTile(T=64, stages=3)
_LARGE = LogitTile(T=128, R=128, K=64, warps=8, stages=5)
# Programs from which _LARGE is taken: with 112 (Kimi-K3, 2048 tokens) and 128 (Kimi-Linear, 8192) it is a fifth faster
# together with the norm before it, with 64 (Kimi-Linear, 4096) 9 % slower.
_LEAST_LARGE = 96
_MOST_NARROW = 132  # programs of _NARROW while each has a multiprocessor of its own: measured with 128 (1024 tokens)


def scratch_words(experts: int) -> int:
    """int32 words that a layer owns for its router: a pair for each score of `FEW_TOKENS` tokens."""
    return 2 * FEW_TOKENS * (experts + experts % 2)


def logit_tile(tokens: int, experts: int, width: int, itemsize: int) -> LogitTile:
    """For rows of `width` numbers of `itemsize` bytes."""
    if itemsize > 2:
        return LogitTile(T=16)
    if tokens <= SPLIT_TOKENS:
        return LogitTile(T=min(64, max(16, 1 << (tokens - 1).bit_length())))
    if width % SEGMENT == 0 and _LARGE.programs(tokens, experts) >= _LEAST_LARGE:
        return _LARGE
    return _NARROW if _NARROW.programs(tokens, experts) <= _MOST_NARROW else _MIDDLE


def unfit(moe: MoeConfig, width: int) -> str | None:
    """Why the kernels were not made for such a model, or None."""
    if moe.groups != 1 or moe.scoring != "sigmoid":
        return f"needs sigmoid scores of one expert group, they are {moe.scoring} of {moe.groups}"
    if width % 8 or width > MOST_WIDTH:
        return f"needs a hidden_size that is a multiple of 8 up to {MOST_WIDTH}, it is {width}"
    if moe.experts > MOST_EXPERTS or moe.top_k > MOST_CHOICES:
        return f"needs up to {MOST_CHOICES} of {MOST_EXPERTS} experts, they are {moe.top_k} of {moe.experts}"
    return None
