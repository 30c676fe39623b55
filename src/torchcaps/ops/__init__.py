"""Fast kernels behind plain functions."""

from torchcaps.ops.allocator import keep_memory
from torchcaps.ops.buffers import release_buffers
from torchcaps.ops.conv_pair import TransformedKernel, conv_pair, transform_kernel
from torchcaps.ops.strided_conv import strided_conv2d

__all__ = ["TransformedKernel", "conv_pair", "keep_memory", "release_buffers", "strided_conv2d", "transform_kernel"]
