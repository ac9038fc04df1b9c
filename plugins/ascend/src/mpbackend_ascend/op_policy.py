"""What torch_npu's autocast does with each operator.

torch_npu registers its policy in compiled code and states it in no header that is installed, so it stands here; the simulated lane compares the names with
the dispatcher of the installed wheel, and observes each policy.

Source: Ascend/pytorch tag v26.2.0-beta.1-pytorch2.13.0, torch_npu/csrc/aten/AutoCastOps.cpp; the same 104 names in the wheel of torch_npu 2.13.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpbackend.backend import PolicyKind

AUTOCAST_KEY = "AutocastPrivateUse1"


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


LOWER = words("""
_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm
chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
""")
"""Run in the autocast format."""

FP32 = words("""
acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm
rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss
""")
"""Run in fp32."""

FP32_OUTPUT = words("""
cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int norm.Scalar norm.ScalarOpt_dim prod prod.dim_int softmax.int
sum sum.dim_IntList
""")
"""Run in fp32 unless the caller gives a format of the result."""

PROMOTE = words("""
addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot
""")
"""Run in the widest format among the operands."""

BANNED = ("binary_cross_entropy",)
"""Raise under autocast."""

KINDS: tuple[tuple[tuple[str, ...], PolicyKind], ...] = ((LOWER, "lower"), (FP32, "fp32"), (FP32_OUTPUT, "fp32"), (PROMOTE, "promote"), (BANNED, "banned"))

POLICY: Mapping[str, PolicyKind] = MappingProxyType({name: kind for names, kind in KINDS for name in names})
"""Operator, ``name`` or ``name.overload``, to its policy."""
