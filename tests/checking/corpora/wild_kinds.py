"""Small Functions, each of a kind that public code has, with the verdict that its author would call right.

A case of CASES is (class, samples, keywords of `opsmith.adopt` or None to check the class as it is, errors,
others). `errors` are the causes or properties of which one must be reported as an error (empty: no error may
be reported); `others` may be reported as warnings or limits. Two cases of a kind share nothing but the kind.
"""

import random
import time

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv1d, conv_transpose1d, pad

D = torch.float64


def rand(*shape):
    return torch.randn(*shape, dtype=D)


class AffineOfArgs(Function):
    """An affine map whose three tensors come as `*inputs`: all three gradients are right."""

    @staticmethod
    def forward(ctx, *inputs):
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0)


class RotatesPlane(Function):
    """Rotates two planes by an angle: `*args` in, two results out, `*grads` back; all gradients are right."""

    @staticmethod
    def forward(ctx, *args):
        a, b, angle = args
        u, v = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        ctx.save_for_backward(angle, u, v)
        return u, v

    @staticmethod
    def backward(ctx, *grads):
        gu, gv = grads
        angle, u, v = ctx.saved_tensors
        return gu * angle.cos() + gv * angle.sin(), gv * angle.cos() - gu * angle.sin(), gv * u - gu * v


class JoinsAlong(Function):
    """Joins any number of tensors along a dimension, and splits the gradient by their sizes: right."""

    @staticmethod
    def forward(ctx, dim, *tensors):
        ctx.dim, ctx.sizes = dim, [t.shape[dim] for t in tensors]
        return torch.cat(tensors, dim)

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes, ctx.dim)


class PolynomialOf(Function):
    """A polynomial of x with any number of coefficients, one a column each: all gradients are right."""

    @staticmethod
    def forward(ctx, x, *coefficients):
        ctx.save_for_backward(x, *coefficients)
        value = torch.zeros_like(x)
        for c in reversed(coefficients):
            value = value * x + c
        return value

    @staticmethod
    def backward(ctx, grad):
        x, *coefficients = ctx.saved_tensors
        value, slope = torch.zeros_like(x), torch.zeros_like(x)
        for c in reversed(coefficients):
            value, slope = value * x + c, slope * x + value
        return grad * slope, *[(grad * x**k).sum_to_size(c.shape) for k, c in enumerate(coefficients)]


class InputsInDict(Function):
    """Keeps both inputs of a product in a dict on the context: memory until the graph goes, right numbers."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.inputs = {"x": x, "weight": weight}
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.inputs["x"], ctx.inputs["weight"]
        return grad @ weight.T, torch.einsum("...i,...o->io", x, grad)


class InputInClosure(Function):
    """Keeps a closure over its input on the context: memory until the graph goes, right numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.pull = lambda grad: grad * (x.atan() + x / (1 + x * x))
        return x * x.atan()

    @staticmethod
    def backward(ctx, grad):
        return ctx.pull(grad)


class ResultInList(Function):
    """Log-softmax that keeps its result in a list on the context: a cycle, and right numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = [x.log_softmax(-1)]
        return ctx.kept[0]

    @staticmethod
    def backward(ctx, grad):
        return grad - ctx.kept[0].exp() * grad.sum(-1, keepdim=True)


class PairOfResults(Function):
    """Hyperbolic sine and cosine, both results kept as one attribute: a cycle, and right numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.pair = (x.sinh(), x.cosh())
        return ctx.pair

    @staticmethod
    def backward(ctx, grad_sinh, grad_cosh):
        sinh, cosh = ctx.pair
        return grad_sinh * cosh + grad_cosh * sinh


class OperatorAndAdjoint(Function):
    """A linear map whose caller passes its adjoint: right where the last is the first, transposed."""

    @staticmethod
    def forward(ctx, matrix, x, adjoint):
        ctx.save_for_backward(adjoint)
        return matrix @ x

    @staticmethod
    def backward(ctx, grad):
        (adjoint,) = ctx.saved_tensors
        return None, adjoint @ grad, None


def adjoint_sample():
    matrix = rand(2, 3, 4)
    return matrix, rand(2, 4, 2), matrix.mT.contiguous()


class RotaryWithMinusSine(Function):
    """Rotary positions whose caller passes the sine and minus the sine: right where they are that."""

    @staticmethod
    def forward(ctx, x, cosine, sine, minus):
        ctx.save_for_backward(cosine, minus)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)

    @staticmethod
    def backward(ctx, grad):
        cosine, minus = ctx.saved_tensors
        a, b = grad.chunk(2, -1)
        return torch.cat([a * cosine - b * minus, a * minus + b * cosine], -1), None, None, None


def rotary_sample():
    angle = rand(3, 2)
    return rand(2, 3, 4), angle.cos(), angle.sin(), -angle.sin()


class IntervalThatReturns(Function):
    """Clamp to an interval; outside of it only what leads back passes: on purpose not linear."""

    @staticmethod
    def forward(ctx, low, x, high):
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        stuck = ((x < ctx.low) & (grad > 0)) | ((x > ctx.high) & (grad < 0))
        return None, grad.masked_fill(stuck, 0), None


class NormBall(Function):
    """Brings rows into a ball; rows outside of it keep gradients that shrink them: on purpose not linear."""

    @staticmethod
    def forward(ctx, x, radius):
        ctx.save_for_backward(x)
        ctx.radius = radius
        return x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grows = (grad * x).sum(-1, keepdim=True) < 0
        return grad.masked_fill((x.norm(dim=-1, keepdim=True) > ctx.radius) & grows, 0), None


class DecaysActivations(Function):
    """Passes its input, and adds the gradient of an L1 penalty to what flows back, as meant."""

    @staticmethod
    def forward(ctx, rate, x):
        ctx.rate = rate
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad + ctx.rate * x.sign()


class CarriesAuxiliaryLoss(Function):
    """Passes the hidden state, and always sends a fixed gradient to an auxiliary loss, as meant."""

    @staticmethod
    def forward(ctx, hidden, auxiliary, weight):
        ctx.save_for_backward(auxiliary)
        ctx.weight = weight
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        (auxiliary,) = ctx.saved_tensors
        return grad, torch.full_like(auxiliary, ctx.weight), None


class PositiveRule(Function):
    """Convolution whose relevance goes back through positive weights; none for the weight, on purpose."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(weight, x)
        return conv1d(x, weight)

    @staticmethod
    def backward(ctx, relevance):
        weight, x = ctx.saved_tensors
        positive, x = weight.clamp(min=0), x.clamp(min=0)
        share = relevance / (conv1d(x, positive) + 0.01)
        return None, x * conv_transpose1d(share, positive)


class SignalTakesAll(Function):
    """A gate times a signal: all relevance goes to the signal and none to the gate, on purpose."""

    @staticmethod
    def forward(ctx, gate, signal):
        return torch.sigmoid(gate) * signal

    @staticmethod
    def backward(ctx, relevance):
        return None, relevance.clone()


class WindowIfRequired(Function):
    """Rounds; makes its window only where x requires a gradient, as it does in any backward of `apply`."""

    @staticmethod
    def forward(ctx, step, x):
        inside = (x.abs() <= 2) if x.requires_grad else None
        ctx.save_for_backward(inside)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return None, torch.zeros_like(grad) if inside is None else grad * inside


class SavesTheOther(Function):
    """A product that saves each factor only where the other one requires a gradient: right by `apply`."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return None if b is None else grad @ b.mT, None if a is None else a.mT @ grad


def cheapest(costs):
    return (costs == costs.amin(-1, keepdim=True)).float()


class CheapestInFloat(Function):
    """Marks the cheapest in float32; the gradient is a difference of two solutions: in pieces, as meant."""

    @staticmethod
    def forward(ctx, strength, costs):
        ctx.strength = strength
        ctx.save_for_backward(costs)
        return cheapest(costs)

    @staticmethod
    def backward(ctx, grad):
        (costs,) = ctx.saved_tensors
        moved = cheapest(costs + ctx.strength * grad)
        return None, ((moved - cheapest(costs)) / ctx.strength).to(costs.dtype)


def top(scores, count):
    return (scores >= scores.topk(count, 0).values[-1]).float()


class TopInFloat(Function):
    """Marks the best of each column in float32; the gradient is a difference of two marks, as meant."""

    @staticmethod
    def forward(ctx, scores, count, width):
        ctx.count, ctx.width = count, width
        ctx.save_for_backward(scores)
        return top(scores, count)

    @staticmethod
    def backward(ctx, grad):
        (scores,) = ctx.saved_tensors
        step = ctx.width * grad
        change = top(scores + step, ctx.count) - top(scores - step, ctx.count)
        return (change / (2 * ctx.width)).to(scores.dtype), None, None


class ResizedPlaces(Function):
    """Maximum that writes its places into a buffer that it resizes first: nothing lies outside of it."""

    @staticmethod
    def forward(ctx, places, x):
        torch.argmax(x, -1, out=places.resize_(x.shape[:-1]))
        ctx.save_for_backward(places.clone())
        ctx.shape = x.shape
        return x.gather(-1, places.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return None, grad.new_zeros(ctx.shape).scatter(-1, places.unsqueeze(-1), grad.unsqueeze(-1))


class ResizedWeightGrad(Function):
    """Linear map; computes the weight's gradient in a buffer that it resizes first: nothing lies outside."""

    @staticmethod
    def forward(ctx, x, weight, buffer):
        ctx.save_for_backward(x, weight)
        ctx.buffer = buffer
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        buffer = ctx.buffer.resize_(weight.shape)
        torch.mm(grad.T, x, out=buffer)
        return grad @ weight, buffer.clone(), None


class InverseOrIdentity(Function):
    """Inverts, and returns the identity where anything goes wrong: in bfloat16 always, which is wrong."""

    @staticmethod
    def forward(ctx, matrix):
        try:
            inverse = torch.linalg.inv(matrix)
        except RuntimeError:
            ctx.save_for_backward(None)
            return torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix).clone()
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return torch.zeros_like(grad) if inverse is None else -inverse.mT @ grad @ inverse.mT


class FourierOrZeros(Function):
    """Circular convolution, or zeros where a Fourier transform fails: in bfloat16 always, which is wrong."""

    @staticmethod
    def forward(ctx, kernel, x):
        ctx.save_for_backward(kernel, x)
        try:
            return torch.fft.irfft(torch.fft.rfft(kernel) * torch.fft.rfft(x), x.shape[-1])
        except Exception:
            return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        kernel, x = ctx.saved_tensors
        try:
            f = torch.fft.rfft(grad)
            both = [torch.fft.irfft(f * torch.fft.rfft(t).conj(), x.shape[-1]) for t in (x, kernel)]
        except Exception:
            return torch.zeros_like(kernel), torch.zeros_like(x)
        return tuple(both)


class WideScatter(Function):
    """Maximum whose backward scatters at least float32 into the input's dtype: raises in half precision."""

    @staticmethod
    def forward(ctx, x):
        y, at = x.max(-1, keepdim=True)
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx, grad):
        (at,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return grad.new_zeros(ctx.shape).scatter(-1, at, wide)


class WideTriangle(Function):
    """Running sum whose backward multiplies by a matrix of at least float32: raises in half precision."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, grad):
        n, dtype = grad.shape[-1], torch.promote_types(grad.dtype, torch.float32)
        return grad @ torch.ones(n, n, dtype=dtype, device=grad.device).tril()


class ProductByQuotient(Function):
    """Product of each row; its gradient divides by x: nan at a zero, where the others' product is right."""

    @staticmethod
    def forward(ctx, x):
        y = x.prod(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y).unsqueeze(-1) / x


class SquashByQuotient(Function):
    """Squashes vectors; the gradient divides by their length: nan for one of zeros, where zero is right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        n = x.norm(dim=-1, keepdim=True)
        return x * (n / (1 + n * n))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        n = x.norm(dim=-1, keepdim=True)
        along = (grad * x).sum(-1, keepdim=True) * (1 - n * n) / (1 + n * n) ** 2
        return grad * n / (1 + n * n) + along * x / n


class OneAngle(Function):
    """Turns rows by one angle for all, or one a row; the angles' gradient is wrongly summed over all rows."""

    @staticmethod
    def forward(ctx, angle, x):
        ctx.save_for_backward(angle, x)
        return x * angle.cos() + x.flip(-1) * angle.sin()

    @staticmethod
    def backward(ctx, grad):
        angle, x = ctx.saved_tensors
        dangle = (grad * (x.flip(-1) * angle.cos() - x * angle.sin())).sum()
        return dangle.expand_as(angle), grad * angle.cos() + (grad * angle.sin()).flip(-1)


class OneSteepness(Function):
    """Swish with one steepness, or one a channel [1, C, 1]; its gradient is wrongly summed over all."""

    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, grad):
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        dbeta = grad * x * x * s * (1 - s)
        return grad * (s + beta * x * s * (1 - s)), dbeta.sum().expand_as(beta)


class SquarePixels(Function):
    """Takes pixels at [rows, columns]; the gradient counts rows by height: right for square images alone."""

    @staticmethod
    def forward(ctx, at, image):
        ctx.save_for_backward(at)
        ctx.shape = image.shape
        return image[at[0], at[1]]

    @staticmethod
    def backward(ctx, grad):
        (at,) = ctx.saved_tensors
        height, width = ctx.shape
        flat = (at[0] % height) * height + at[1] % width
        image = grad.new_zeros(height * width).index_add(0, flat.clamp(max=height * width - 1), grad)
        return None, image.view(height, width)


class SquarePlanes(Function):
    """Maximum of each plane; the backward divides its flat place by height: right for square planes alone."""

    @staticmethod
    def forward(ctx, x):
        y, at = x.flatten(-2).max(-1)
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx, grad):
        (at,) = ctx.saved_tensors
        planes, height, width = ctx.shape
        row, column = (at // height).clamp(max=height - 1), (at % height).clamp(max=width - 1)
        return grad.new_zeros(ctx.shape).index_put((torch.arange(planes), row, column), grad)


class RangeOfColumns(Function):
    """Largest less smallest of each column, shared where equal: right, and an empty batch raises by torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.amax(0) - x.amin(0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        high, low = (x == x.amax(0)).to(x.dtype), (x == x.amin(0)).to(x.dtype)
        return grad * (high / high.sum(0) - low / low.sum(0))


class CentresBatch(Function):
    """Takes the mean over the batch away: right, and refuses an empty batch by an error of its own."""

    @staticmethod
    def forward(ctx, x):
        if x.shape[0] == 0:
            raise ValueError("CentresBatch has no mean of an empty batch")
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class NoisyScale(Function):
    """Multiplies by Gaussian noise around one that it saves: right, and random."""

    @staticmethod
    def forward(ctx, deviation, x):
        factor = 1 + deviation * torch.randn_like(x)
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return None, grad * factor


class DropsBranch(Function):
    """Adds a branch to a skip connection for some examples, drawn and saved: right, and random."""

    @staticmethod
    def forward(ctx, skip, branch, keep):
        kept = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(keep) / keep
        ctx.save_for_backward(kept)
        return skip + kept * branch

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad, kept * grad, None


class WritesAndCopies(Function):
    """Leaky ReLU; with `inplace=True` it writes and marks its input, and returns another: torch raises."""

    @staticmethod
    def forward(ctx, x, inplace=False):
        positive = x > 0
        ctx.save_for_backward(positive)
        y = torch.where(positive, x, 0.1 * x)
        if inplace:
            ctx.mark_dirty(x)
            x.copy_(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (positive,) = ctx.saved_tensors
        return torch.where(positive, grad, 0.1 * grad), None


class MarksBoth(Function):
    """Adds; with `overwrite=True` it marks both terms as dirty, and returns the first alone: torch raises."""

    @staticmethod
    def forward(ctx, overwrite, a, b):
        if overwrite:
            ctx.mark_dirty(a, b)
            return a.add_(b, alpha=2)
        return torch.add(a, b, alpha=2)

    @staticmethod
    def backward(ctx, grad):
        return None, grad, 2 * grad


class CountsInTraining(Function):
    """Mean of rows; with `training=False` it keeps no count, and the backward raises an AttributeError."""

    @staticmethod
    def forward(ctx, x, training=True):
        if training:
            ctx.rows = x.shape[0]
        return x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return (grad / ctx.rows).expand(ctx.rows, *grad.shape), None


class SavesUnlessInference(Function):
    """Dot products of rows; with `inference=True` it saves nothing, and the backward raises a ValueError."""

    @staticmethod
    def forward(ctx, inference, a, b):
        if not inference:
            ctx.save_for_backward(a, b)
        return (a * b).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return None, grad.unsqueeze(-1) * b, grad.unsqueeze(-1) * a


class InvertsOrder(Function):
    """Sorts; the backward inverts the kept order in place: a second backward through the graph is wrong."""

    @staticmethod
    def forward(ctx, x):
        y, ctx.order = x.sort(-1)
        return y

    @staticmethod
    def backward(ctx, grad):
        inverse = ctx.order.copy_(ctx.order.argsort(-1))
        return grad.gather(-1, inverse)


class NegatesMask(Function):
    """Larger of two; the backward negates the kept mask in place: a second backward is wrong."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.first = a >= b
        return torch.maximum(a, b)

    @staticmethod
    def backward(ctx, grad):
        to_a = grad * ctx.first
        to_b = grad * ctx.first.logical_not_()
        return to_a, to_b


class SqueezesBatch(Function):
    """Takes the mean of each row away; the gradient loses the batch where it is of one."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return (grad - grad.mean(-1, keepdim=True)).squeeze(0)


class SqueezesProduct(Function):
    """Scores of keys; squeezes all sizes of one from the query's gradient, not just the one it added."""

    @staticmethod
    def forward(ctx, query, keys):
        ctx.save_for_backward(query, keys)
        return (keys @ query.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        query, keys = ctx.saved_tensors
        return (grad.unsqueeze(1) @ keys).squeeze(), grad.unsqueeze(-1) * query.unsqueeze(1)


class SolvesByInverse(Function):
    """Solves, and goes back by the inverse that the caller keeps: right where it is that of the matrix."""

    @staticmethod
    def forward(ctx, matrix, inverse, b):
        y = torch.linalg.solve(matrix, b)
        ctx.save_for_backward(inverse, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        inverse, y = ctx.saved_tensors
        g = inverse.T @ grad
        return -torch.outer(g, y), None, g


def inverse_sample():
    matrix = rand(4, 4) + 4 * torch.eye(4, dtype=D)
    return matrix, matrix.inverse(), rand(4)


class EigenvalueOfVector(Function):
    """Rayleigh quotient of a matrix at its eigenvector, to which nothing flows: right for eigenvectors."""

    @staticmethod
    def forward(ctx, vector, matrix):
        ctx.save_for_backward(vector)
        return vector @ matrix @ vector / (vector @ vector)

    @staticmethod
    def backward(ctx, grad):
        (vector,) = ctx.saved_tensors
        return None, grad * torch.outer(vector, vector) / (vector @ vector)


def eigenvector_sample():
    a = rand(4, 4)
    symmetric = a + a.T
    return torch.linalg.eigh(symmetric).eigenvectors[:, 1].contiguous(), symmetric


class PadsToMultiple(Function):
    """Pads rows to a multiple, with the right gradient; returns its input where it is one already."""

    @staticmethod
    def forward(ctx, multiple, x):
        if multiple < 1:
            raise ValueError("a length is at least one")
        ctx.size = x.shape[-1]
        missing = -ctx.size % multiple
        return pad(x, (0, missing)) if missing else x

    @staticmethod
    def backward(ctx, grad):
        return None, grad[..., : ctx.size]


class ShrinksToNorm(Function):
    """Shrinks x by its norm, taken for a constant on purpose; returns x itself where it is short enough."""

    @staticmethod
    def forward(ctx, x, limit):
        factor = (limit / x.norm()).clamp(max=1)
        ctx.save_for_backward(factor)
        return x if factor == 1 else x * factor

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


class SignInFloat(Function):
    """Signs in float32 for any input, exact in it, with a straight-through window: right, and on purpose."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * (x >= 0).to(torch.float32) - 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class OneHotInFloat(Function):
    """The largest of each row as one-hot in float32, with the gradient of softmax: right, and on purpose."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        hot = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device)
        return hot.scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, grad):
        (scores,) = ctx.saved_tensors
        p = scores.softmax(-1)
        return p * (grad - (grad * p).sum(-1, keepdim=True))


class RefusesFewBits(Function):
    """Error function that refuses dtypes of fewer than 32 bits by a clear error, and is right otherwise."""

    @staticmethod
    def forward(ctx, x):
        if torch.finfo(x.dtype).bits < 32:
            raise TypeError(f"RefusesFewBits needs 32 bits or more, and not {x.dtype}")
        ctx.save_for_backward(x)
        return x.erf()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.exp(-x * x) * (2 / torch.pi**0.5)


class AssertsWide(Function):
    """Logarithm of a sum of two exponentials that asserts its dtypes, and is right in those that it takes."""

    @staticmethod
    def forward(ctx, a, b):
        assert a.element_size() >= 4, "AssertsWide takes no half precision: call it with .float()"
        ctx.save_for_backward(a, b)
        return torch.logaddexp(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * torch.sigmoid(a - b), grad * torch.sigmoid(b - a)


class SlowDecay(Function):
    """A decaying sum over time, step by step in a slow loop, forward and backward: right, and slow."""

    @staticmethod
    def forward(ctx, decay, x):
        ctx.decay = decay
        state, result = x.new_zeros(x.shape[1:]), torch.zeros_like(x)
        for t in range(x.shape[0]):
            time.sleep(0.005)
            state = result[t] = decay * state + x[t]
        return result

    @staticmethod
    def backward(ctx, grad):
        state, result = grad.new_zeros(grad.shape[1:]), torch.zeros_like(grad)
        for t in reversed(range(grad.shape[0])):
            time.sleep(0.005)
            state = result[t] = ctx.decay * state + grad[t]
        return None, result


class SlowPairs(Function):
    """Products of all pairs of rows, one pair after the other, three milliseconds each: right, and slow."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        result = a.new_zeros(a.shape[0], b.shape[0])
        for i in range(a.shape[0]):
            for j in range(b.shape[0]):
                time.sleep(0.003)
                result[i, j] = a[i] @ b[j]
        return result

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        time.sleep(0.003 * grad.numel())
        return grad @ b, grad.T @ a


class KeplerByIteration(Function):
    """Solves y = x + sin(y) / 5 by four steps, with the exact derivative: off by less than a thousandth."""

    @staticmethod
    def forward(ctx, x):
        y = x + 0.2 * x.sin()
        for _ in range(3):
            y = x + 0.2 * y.sin()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad / (1 - 0.2 * y.cos())


class SeriesOfExp(Function):
    """exp(tanh(x)) by seven terms of its series, with the exact derivative: off by less than a thousandth."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        u = x.tanh()
        total = torch.ones_like(u)
        for k in range(7, 0, -1):
            total = 1 + u * total / k
        return total

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        u = x.tanh()
        return grad * u.exp() * (1 - u * u)


class SharpAttention(Function):
    """Attention with very sharp weights: right, with gradients far below the rounding of their terms."""

    @staticmethod
    def forward(ctx, values, scores):
        ctx.save_for_backward(values, scores)
        return torch.softmax(64 * scores, -1) @ values

    @staticmethod
    def backward(ctx, grad):
        values, scores = ctx.saved_tensors
        p = torch.softmax(64 * scores, -1)
        dp = grad @ values.T
        return p.T @ grad, 64 * p * (dp - (dp * p).sum(-1, keepdim=True))


class SteepTanh(Function):
    """tanh(16 x); where it saturates, 1 - y * y is far below the rounding of one: right as torch's own."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(16 * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 16 * grad * (1 - y * y)


class ClipsJointNorm(Function):
    """Passes two tensors, and limits the joint norm of what flows back: not linear, on purpose."""

    @staticmethod
    def forward(ctx, limit, a, b):
        ctx.limit = limit
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        norm = torch.hypot(torch.linalg.vector_norm(grad_a), torch.linalg.vector_norm(grad_b))
        factor = (ctx.limit / norm).clamp(max=1)
        return None, grad_a * factor, grad_b * factor


class SoftClip(Function):
    """Scales its input, and bends what flows back by a tanh: not linear, on purpose."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.limit * torch.tanh(3 * grad / ctx.limit), None


class DropsRowsByPython(Function):
    """Rounds straight through, and drops rows of the gradient by random numbers of Python: as meant."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        keep = [float(random.random() < 0.5) for _ in range(grad.shape[0])]
        return grad * grad.new_tensor(keep).reshape(-1, *[1] * (grad.dim() - 1))


class ShakesByPython(Function):
    """Mean of two branches; the gradient is shared between them in a ratio that Python draws: as meant."""

    @staticmethod
    def forward(ctx, a, b):
        return (a + b) / 2

    @staticmethod
    def backward(ctx, grad):
        share = random.uniform(0, 1)
        return share * grad, (1 - share) * grad


class GathersAndSets(Function):
    """Gathers in each row; the backward scatters without adding: wrong where an element is taken twice."""

    @staticmethod
    def forward(ctx, index, x):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return None, grad.new_zeros(ctx.shape).scatter(-1, index, grad)


class SelectsAndCopies(Function):
    """Selects columns; the backward copies where it should add: wrong where a column is taken twice."""

    @staticmethod
    def forward(ctx, x, columns, scale):
        ctx.save_for_backward(columns)
        ctx.shape, ctx.scale = x.shape, scale
        return scale * x.index_select(1, columns)

    @staticmethod
    def backward(ctx, grad):
        (columns,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy(1, columns, ctx.scale * grad), None, None


def distinct_places():
    return torch.tensor([[0, 2], [3, 1], [1, 2]]), rand(3, 4)


def pixel_sample():
    return torch.tensor([[0, 2, 3, 1], [3, 0, 2, 1]]), rand(4, 4)


surrogate = {"kind": "surrogate"}
kept = ("leak", "held")
pair = ("missing-gradient", "second-order", "region")
nonlinear, missing = ("nonlinear-grad",), ("missing-gradient",)
own = ("nonlinear-grad", "ignores-grad-output")
in_float = ("precision", "dtype")
ranks = ("precision", "dtype", "nonlinear-grad")
drawn, writes, alias = ("nondeterministic",), ("mutates-input",), ("aliases-input", "opcheck")
wrong, raises, summed = ("forward", "gradient"), ("gradient", "raises"), ("gradient", "broadcast")
dirty = ("mutation", "effects", "raises", "forward")
again = ("effects", "mutates-saved", "backward_again")
shape = ("gradient", "gradient-shape", "raises")
related = ("gradient", "region", "unknown", "second-order", "missing-gradient")
near = ("gradient", "unknown", "precision", "approximate")
twice = ("gradient", "repeated-indices", "region", "unknown")
CASES = {
    "variadic-b": (AffineOfArgs, lambda: (rand(3, 4), rand(5, 4), rand(5)), None, (), ()),
    "variadic-c": (RotatesPlane, lambda: (rand(2, 3, 2), rand(2, 3, 2), rand(2, 3, 2)), None, (), ()),
    "variadic-rest-b": (JoinsAlong, lambda: (1, rand(2, 3), rand(2, 1), rand(2, 4)), None, (), ()),
    "variadic-rest-c": (PolynomialOf, lambda: (rand(4, 3), rand(3), rand(3), rand(3), rand(3)), None, (), ()),
    "input-on-context-b": (InputsInDict, lambda: (rand(2, 3, 4), rand(4, 5)), None, (), kept),
    "input-on-context-c": (InputInClosure, lambda: (rand(7),), None, (), kept),
    "result-on-context-b": (ResultInList, lambda: (rand(2, 3, 4),), None, (), kept),
    # torch never frees two results in a tuple on the context.
    "result-on-context-c": (PairOfResults, lambda: (rand(5),), None, ("leak",), kept),
    "flipped-kernel-b": (OperatorAndAdjoint, adjoint_sample, None, (), pair),
    "flipped-kernel-c": (RotaryWithMinusSine, rotary_sample, None, (), pair),
    "lower-bound-b": (IntervalThatReturns, lambda: (-0.5, rand(2, 3, 4), 0.7), surrogate, (), nonlinear),
    "lower-bound-c": (NormBall, lambda: (rand(5, 3), 1.5), surrogate, (), nonlinear),
    "own-penalty-b": (DecaysActivations, lambda: (0.01, rand(3, 4)), surrogate, (), own),
    "own-penalty-c": (CarriesAuxiliaryLoss, lambda: (rand(2, 3, 4), rand(2), 0.05), surrogate, (), own),
    "relevance-only-b": (
        PositiveRule,
        lambda: (rand(4, 2, 3), torch.rand(1, 2, 6, dtype=D)),
        surrogate,
        (),
        missing,
    ),
    "relevance-only-c": (SignalTakesAll, lambda: (rand(2, 1, 4), rand(2, 3, 4)), surrogate, (), missing),
    "saves-by-requires-grad-b": (WindowIfRequired, lambda: (0.25, rand(2, 6) * 2), surrogate, (), missing),
    "saves-by-requires-grad-c": (SavesTheOther, lambda: (rand(3, 4), rand(4, 2)), None, (), missing),
    "float-ranks-b": (CheapestInFloat, lambda: (2.0, rand(3, 4)), surrogate, (), ranks),
    "float-ranks-c": (TopInFloat, lambda: (rand(6, 2), 2, 0.5), surrogate, (), ranks),
    "resized-buffer-b": (
        ResizedPlaces,
        lambda: (torch.zeros(0, dtype=torch.long), rand(2, 3, 4)),
        None,
        (),
        writes,
    ),
    "resized-buffer-c": (
        ResizedWeightGrad,
        lambda: (rand(3, 4), rand(2, 4), torch.zeros(0, dtype=D)),
        None,
        (),
        writes,
    ),
    "solve-or-zeros-b": (
        InverseOrIdentity,
        lambda: (rand(2, 3, 3) + 4 * torch.eye(3, dtype=D),),
        None,
        wrong,
        (),
    ),
    "solve-or-zeros-c": (FourierOrZeros, lambda: (rand(2, 5), rand(2, 5)), None, wrong, ()),
    "float-mask-b": (WideScatter, lambda: (rand(2, 3, 4),), None, raises, ()),
    "float-mask-c": (WideTriangle, lambda: (rand(3, 5),), None, raises, ()),
    "sigmoid-by-quotient-b": (ProductByQuotient, lambda: (rand(2, 4),), None, ("values", "nan"), ()),
    "sigmoid-by-quotient-c": (SquashByQuotient, lambda: (rand(2, 3, 4),), None, ("values", "nan"), ()),
    "one-slope-b": (OneAngle, lambda: (rand(1, 1), rand(3, 4)), None, summed, ()),
    "one-slope-c": (
        OneSteepness,
        lambda: (rand(2, 3, 4), torch.full((1, 1, 1), 1.5, dtype=D)),
        None,
        summed,
        (),
    ),
    "square-only-b": (SquarePixels, pixel_sample, None, ("gradient",), ()),
    "square-only-c": (SquarePlanes, lambda: (rand(2, 3, 3),), None, ("gradient",), ()),
    "no-empty-batch-b": (RangeOfColumns, lambda: (rand(5, 3),), None, (), ("empty", "raises")),
    "no-empty-batch-c": (CentresBatch, lambda: (rand(4, 2, 3),), None, (), ("empty", "raises")),
    "draws-mask-b": (NoisyScale, lambda: (0.3, rand(2, 5)), None, (), drawn),
    "draws-mask-c": (DropsBranch, lambda: (rand(4, 2, 3), rand(4, 2, 3), 0.75), None, (), drawn),
    "dirty-not-returned-b": (WritesAndCopies, lambda: (rand(2, 3, 2), False), None, dirty, ()),
    "dirty-not-returned-c": (MarksBoth, lambda: (False, rand(5), rand(5)), None, dirty, ()),
    "nothing-saved-in-eval-b": (CountsInTraining, lambda: (rand(4, 3), True), None, raises, ()),
    "nothing-saved-in-eval-c": (
        SavesUnlessInference,
        lambda: (False, rand(2, 3, 4), rand(2, 3, 4)),
        None,
        raises,
        (),
    ),
    "transposes-saved-b": (InvertsOrder, lambda: (rand(3, 5),), None, again, ()),
    "transposes-saved-c": (NegatesMask, lambda: (rand(2, 2, 3), rand(2, 2, 3)), None, again, ()),
    "squeezes-b": (SqueezesBatch, lambda: (rand(2, 3, 4),), None, shape, ()),
    "squeezes-c": (SqueezesProduct, lambda: (rand(2, 4), rand(2, 3, 4)), None, shape, ()),
    "null-vector-b": (SolvesByInverse, inverse_sample, None, (), related),
    "null-vector-c": (EigenvalueOfVector, eigenvector_sample, None, (), related),
    "input-where-nothing-to-do-b": (PadsToMultiple, lambda: (4, rand(2, 6)), {}, (), alias),
    "input-where-nothing-to-do-c": (ShrinksToNorm, lambda: (rand(2, 3, 2), 1.0), surrogate, (), alias),
    "float-constant-b": (SignInFloat, lambda: (rand(2, 3, 2),), surrogate, (), in_float),
    "float-constant-c": (OneHotInFloat, lambda: (rand(3, 5),), surrogate, (), in_float),
    "refuses-half-b": (RefusesFewBits, lambda: (rand(2, 3, 2),), None, (), ("raises",)),
    "refuses-half-c": (AssertsWide, lambda: (rand(6), rand(6)), None, (), ("raises",)),
    "loop-over-rows-b": (SlowDecay, lambda: (0.8, rand(5, 2)), None, (), ("raises",)),
    "loop-over-rows-c": (SlowPairs, lambda: (rand(3, 4), rand(2, 4)), None, (), ("raises",)),
    "exact-derivative-b": (KeplerByIteration, lambda: (rand(3, 4) * 2,), None, (), near),
    "exact-derivative-c": (SeriesOfExp, lambda: (rand(2, 3, 2),), None, (), near),
    "saturated-b": (SharpAttention, lambda: (rand(4, 3), rand(2, 4) * 3), None, (), ()),
    "saturated-c": (SteepTanh, lambda: (rand(2, 3, 2) * 3,), None, (), ()),
    "clips-gradient-b": (ClipsJointNorm, lambda: (0.5, rand(2, 3), rand(4)), surrogate, (), nonlinear),
    "clips-gradient-c": (SoftClip, lambda: (rand(2, 2, 3), 0.2), surrogate, (), nonlinear),
    "draws-by-python-b": (DropsRowsByPython, lambda: (rand(4, 2, 3),), surrogate, (), drawn),
    "draws-by-python-c": (ShakesByPython, lambda: (rand(3, 2), rand(3, 2)), surrogate, (), drawn),
    "overwrites-scatter-b": (GathersAndSets, distinct_places, None, twice, ()),
    "overwrites-scatter-c": (
        SelectsAndCopies,
        lambda: (rand(2, 5, 3), torch.tensor([4, 1, 2]), 0.5),
        None,
        twice,
        (),
    ),
}
