import torch
from rms import rms_norm

import opsmith


def gradient_of_x(grad, x, weight, eps):  # forgets that the root mean square depends on x, too
    return grad * weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


rms_norm.gradients(x=gradient_of_x)
failure = opsmith.check(rms_norm, effort="quick").failures[0]
print(failure.heading(), failure.message, f"where: {failure.where}", sep="\n")
