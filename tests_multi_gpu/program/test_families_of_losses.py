"""The losses of all causal families, as the training program needs them: the mean over the labels of a whole step, and
no further term but the balance of experts, which the program divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import Family, batch_for, build, families

import liger_dist
from liger_dist import LigerDistError
from liger_dist_train.model import check_loss
from liger_dist_train.trainer import router_coefficient

CAUSAL = {family.name: family for family in families() if family.mapping == "causal"}
NAMES = """
    bart bigbird_pegasus blenderbot blenderbot-small cpmant marian mbart mvp pegasus plbart prophetnet trocr whisper xlm
    xlnet
"""
OTHER_LOSSES = NAMES.split()
"""families whose forward ignores the number of labels, or does not shift labels"""
USUAL = ("llama", "qwen3_moe", "gpt_oss", "bart", "xlnet", "mamba2", "gemma3_text")


def built(family: Family) -> Any:
    try:
        model = build(family)
        batch_for(family, model)
    except Exception as error:
        pytest.skip(f"it is not built by the generic shrinking: {error}")
    return model.float().eval()


@pytest.mark.nightly(name=[name for name in CAUSAL if name not in USUAL])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_loss_is_divided_once_or_refused(name: str) -> None:
    family = CAUSAL[name]
    model = built(family)
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = True
    batch = batch_for(family, model)
    try:
        with torch.no_grad():
            one, two = (model(**batch, num_items_in_batch=torch.tensor(float(n))) for n in (1, 2))
    except Exception as error:
        pytest.skip(f"its forward does not run: {error}")
    try:
        wrapped = liger_dist.wrap(model, "none")
    except LigerDistError:
        return  # Refused already: an lm_head of another kind.
    if name in OTHER_LOSSES:
        with pytest.raises(LigerDistError, match=r"does not shift them|ignores num_items_in_batch"):
            check_loss(wrapped)
        return
    check_loss(wrapped)
    balance = getattr(one, "aux_loss", None)
    expected = router_coefficient(model) * float(balance) if isinstance(balance, torch.Tensor) else 0.0
    # What does not become half as large with twice the labels.
    assert float(2 * two.loss - one.loss) == pytest.approx(expected, abs=1e-4 * float(one.loss))
