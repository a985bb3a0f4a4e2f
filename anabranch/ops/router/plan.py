"""What the few-token router was made for. Nothing here needs a GPU."""

from anabranch.config.model import MoeConfig

FEW_TOKENS = 8  # up to here norm and router may be one launch
MOST_WIDTH, MOST_EXPERTS, MOST_CHOICES = 8192, 1024, 32
NARROW_WIDTH, NARROW_EXPERTS = 4096, 256  # what the narrower kernels take


def scratch_words(experts: int) -> int:
    """int32 words that a layer owns for its router: a pair for each score of `FEW_TOKENS` tokens."""
    return 2 * FEW_TOKENS * (experts + experts % 2)


def unfit(moe: MoeConfig, width: int) -> str | None:
    """Why the kernels were not made for such a model, or None."""
    if moe.groups != 1 or moe.scoring != "sigmoid":
        return f"needs sigmoid scores of one expert group, they are {moe.scoring} of {moe.groups}"
    if width % 8 or width > MOST_WIDTH:
        return f"needs a hidden_size that is a multiple of 8 up to {MOST_WIDTH}, it is {width}"
    if moe.experts > MOST_EXPERTS or moe.top_k > MOST_CHOICES:
        return f"needs up to {MOST_CHOICES} of {MOST_EXPERTS} experts, they are {moe.top_k} of {moe.experts}"
    return None
