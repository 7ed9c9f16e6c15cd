"""Messages of modules: words that do not fit the operator or one another, sizes, initialisers, pickles."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors


@opsmith.operator("messages::modular", shapes="x: B M, weight: N M, bias: N -> B N")
def modular(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    groups: int = 1,
    eps: float = 1e-5,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """An affine map that does not look at its other arguments."""
    y = x @ weight.mT
    return y if bias is None else y + bias


@opsmith.operator("messages::without_shapes")
def without_shapes(xs: list[Tensor], scale: Tensor) -> Tensor:
    return torch.stack(xs) * scale


@opsmith.operator("messages::takes_self")
def takes_self(self: Tensor) -> Tensor:
    return self + 1


UNIFORM = opsmith.init.uniform(-0.1, 0.1)
RIGHT: dict[str, Any] = {
    "sizes": ("M", "N"),
    "parameters": {"weight": ("N", "M"), "bias": ("N",)},
    "init": UNIFORM,
    "forward": ("training", "dtype"),
}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sizes as one string": (
        {"sizes": "features"},
        """
        `sizes` is a list of names
          argument: sizes
          got: str 'features'
          WHERE
          hint: write `sizes=("features",)`, with a comma
        """,
    ),
    "sizes as a number": (
        {"sizes": 2},
        """
        `sizes` is a list of names
          argument: sizes
          got: int 2
          WHERE
          hint: give sizes names
        """,
    ),
    "a size that is a number": (
        {"sizes": ("M", 3)},
        """
        `sizes` is a list of names
          argument: sizes
          got: int 3
          WHERE
          hint: write names as text
        """,
    ),
    "a letter called by a list": (
        {"sizes": {"M": ["in_features"]}},
        """
        `sizes` is a list of names
          argument: sizes
          got: list ['in_features']
          WHERE
          hint: write names as text
        """,
    ),
    "a size that is no name": (
        {"sizes": ("in features",)},
        """
        each size must have a different name
          argument: sizes
          expected: identifiers, all different
          got: str 'in features'
          WHERE
          hint: write `sizes=("in_features", "out_features")`
        """,
    ),
    "a size twice": (
        {"sizes": ("M", "M")},
        """
        each size must have a different name
          argument: sizes
          expected: identifiers, all different
          got: str 'M'
          WHERE
          hint: write `sizes=("in_features", "out_features")`
        """,
    ),
    "a size that nothing has": (
        {"sizes": ("M", "N", "K")},
        """
        no parameter or buffer has the size `K`
          argument: sizes
          got: sizes `M`, `N`, `K`
          WHERE
          hint: leave it out, or name it in a shape
        """,
    ),
    "a letter that is none": (
        {"sizes": {"K": "kernel"}},
        """
        `sizes` names `K`, which is not a size in the operator's `shapes=`
          argument: sizes
          expected: one of `B`, `M`, `N`
          got: 'K'
          WHERE
          hint: give the sizes as a list of names, or declare the operator with `shapes=`
        """,
    ),
    "a parameter that is no argument": (
        {"parameters": {"weights": ("N", "M")}},
        """
        `parameters` names `weights`, which is not a tensor argument of the operator
          argument: parameters
          expected: one of `x`, `weight`, `bias`
          WHERE
          hint: name an argument of the reference; for a list of tensors write a module by hand
        """,
    ),
    "a parameter that is no tensor": (
        {"parameters": ("eps",)},
        """
        `parameters` names `eps`, which is not a tensor argument of the operator
          argument: parameters
          expected: one of `x`, `weight`, `bias`
          WHERE
          hint: name an argument of the reference; for a list of tensors write a module by hand
        """,
    ),
    "a shape without a comma": (
        {"parameters": {"weight": ("N", "M"), "bias": "N"}},
        """
        the shape of `bias` is a list of dimensions
          argument: bias
          got: str 'N'
          WHERE
          hint: write `"bias": ("N",)`, with a comma; `()` for a single number
        """,
    ),
    "a dimension that runs code": (
        {"parameters": {"weight": ("N", "open('file')")}},
        """
        the shape of `weight` has a dimension that cannot be read
          argument: weight
          expected: numbers, sizes, and `+ - * // %` of them
          got: str "open('file')"
          WHERE
          hint: write a size, a number, or `"channels // groups"`
        """,
    ),
    "a dimension that is a fraction": (
        {"parameters": {"weight": ("N", 1.5)}},
        """
        the shape of `weight` has a dimension that cannot be read
          argument: weight
          expected: numbers, sizes, and `+ - * // %` of them
          got: float 1.5
          WHERE
          hint: write a size, a number, or `"channels // groups"`
        """,
    ),
    "a dimension with an unknown size": (
        {"parameters": {"weight": ("N", "2 * hidden")}},
        """
        the shape of `weight` names `hidden`, which is not a size
          argument: weight
          expected: one of `M`, `N`, `groups`
          got: '2 * hidden'
          WHERE
          hint: add it to `sizes`
        """,
    ),
    "a letter without a size": (
        {"sizes": ("N",), "parameters": ("weight",)},
        """
        the shape of `weight` names `M`, which is not a size
          argument: weight
          expected: one of `N`, `groups`
          got: 'M'
          WHERE
          hint: add it to `sizes`, or give the letter `M` a name there
        """,
    ),
    "another number of dimensions than `shapes=`": (
        {"parameters": {"weight": ("N", "M"), "bias": ("N", 1)}},
        """
        the shape of `bias` does not fit the operator's `shapes=`
          argument: bias
          expected: `N`
          got: 2 dimensions
          WHERE
          hint: write the same number of dimensions, or only the names: then `shapes=` gives the shapes
        """,
    ),
    "an initialiser for nothing": (
        {"init": {"weight": UNIFORM, "bias": UNIFORM, "gain": UNIFORM}},
        """
        `init` names `gain`, which is neither parameter nor buffer
          argument: init
          expected: one of `weight`, `bias`
          WHERE
          hint: leave it out, or name it in `parameters`
        """,
    ),
    "an initialiser that is a number": (
        {"init": {"weight": UNIFORM, "bias": 0.0}},
        """
        the initialiser of `bias` is not a function
          argument: init
          expected: a function that fills a tensor in place
          got: float 0.0
          WHERE
          hint: write `opsmith.init.constant(0.0)`
        """,
    ),
    "an initialiser that is a name": (
        {"init": "uniform"},
        """
        the initialiser of `weight` is not a function
          argument: init
          expected: a function that fills a tensor in place
          got: str 'uniform'
          WHERE
          hint: write `opsmith.init.uniform(-0.1, 0.1)`
        """,
    ),
    "a parameter that nothing fills": (
        {"init": {"weight": UNIFORM}},
        """
        nothing fills `bias`
          argument: init
          expected: an initialiser for each parameter and buffer, or one for all
          WHERE
          hint: write `init={"bias": opsmith.init.uniform(-0.1, 0.1)}`
        """,
    ),
    "a parameter and buffer": (
        {"buffers": ("bias",)},
        """
        `bias` is a parameter and a buffer
          argument: bias
          WHERE
          hint: keep the name in `parameters` if the tensor is trained, else in `buffers`
        """,
    ),
    "a buffer left out that is none": (
        {"non_persistent": ("bias",)},
        """
        `non_persistent` names `bias`, which is not a buffer
          argument: non_persistent
          expected: no name: there are no `buffers`
          WHERE
          hint: name it in `buffers`, too
        """,
    ),
    "a size and a plain argument": (
        {"sizes": ("M", "N", "groups")},
        """
        `groups` is a size and an argument of the operator
          argument: groups
          WHERE
          hint: leave the name out of `sizes`: shapes may name whole numbers among the arguments
        """,
    ),
    "a size and a parameter": (
        {"sizes": ("M", "N", "bias")},
        """
        `bias` is a size and an argument of the operator
          argument: bias
          WHERE
          hint: give the size a different name
        """,
    ),
    "a size that modules have": (
        {"sizes": ("M", "forward"), "parameters": {"weight": ("forward", "M")}},
        """
        modules use the name `forward` themselves
          argument: forward
          WHERE
          hint: rename it
        """,
    ),
    "an option that modules have": (
        {"forward": ("dtype",)},
        """
        modules use the name `training` themselves
          argument: training
          WHERE
          hint: give it in each call, `forward=("training",)`, or rename the argument
        """,
    ),
    "an option that the constructor has": (
        {"forward": ("training",)},
        """
        modules use the name `dtype` themselves
          argument: dtype
          WHERE
          hint: give it in each call, `forward=("dtype",)`, or rename the argument
        """,
    ),
    "forward with a tensor": (
        {"forward": ("x",)},
        """
        `forward` names `x`, which is a tensor
          argument: forward
          expected: one of `groups`, `eps`, `training`, `dtype`
          WHERE
          hint: leave it out: tensors other than parameters and buffers are always arguments of `forward`
        """,
    ),
    "forward with no argument": (
        {"forward": ("gain",)},
        """
        `forward` names `gain`, which is not an argument of the operator
          argument: forward
          expected: one of `groups`, `eps`, `training`, `dtype`
          WHERE
          hint: name an argument of the reference
        """,
    ),
    "a name that is none": (
        {"name": "class"},
        """
        the class needs a name that Python can bind
          argument: name
          expected: an identifier
          got: str 'class'
          WHERE
          hint: write `name="Linear"`
        """,
    ),
}


def here() -> str:
    """`file:line` of the caller's next line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{frame.f_back.f_code.co_filename}:{frame.f_back.f_lineno + 1}"


def declare(**words: Any) -> Any:
    return modular.module(**words)


def place_of_call() -> str:
    _, first = inspect.getsourcelines(declare)
    return f"{inspect.getsourcefile(declare)}:{first + 1}"


@pytest.mark.parametrize("case", CASES)
def test_a_word_that_does_not_fit(case: str, says: Any) -> None:
    words, message = CASES[case]
    given = {**RIGHT, **words}
    message = f"messages::modular: {inspect.cleandoc(message)}"
    with says(errors.ModuleDeclarationError, message.replace("WHERE", f"where: {place_of_call()}")):
        declare(**given)


def test_the_right_words_fit() -> None:
    assert str(modular.module(**RIGHT)(3, 2)) == "Modular(M=3, N=2, bias=True)"


def test_a_list_is_no_parameter(says: Any) -> None:
    with pytest.raises(errors.ModuleDeclarationError, match="for a list of tensors write a module by hand"):
        without_shapes.module(parameters={"xs": ()}, init=UNIFORM)


def test_names_alone_without_shapes(says: Any) -> None:
    place = here()[: -len("0")]
    with pytest.raises(errors.ModuleDeclarationError) as caught:
        without_shapes.module(parameters=("scale",), init=UNIFORM)
    assert caught.value.problem == "the operator's `shapes=` does not declare the shape of `scale`"
    assert caught.value.got == "no `shapes=`"
    assert caught.value.hint == 'write the shape: `{"scale": ("features",)}`'
    assert str(caught.value.where).startswith(place.rpartition(":")[0])


def test_letters_without_shapes(says: Any) -> None:
    with pytest.raises(errors.ModuleDeclarationError, match="declare the operator with `shapes=`"):
        without_shapes.module(sizes={"M": "features"}, parameters={"scale": ("features",)}, init=UNIFORM)


def test_self_is_taken() -> None:
    with pytest.raises(errors.ModuleDeclarationError, match="`forward` uses the name `self` for the module"):
        takes_self.module()


@pytest.mark.parametrize(
    ("size", "shown"),
    [(1.5, "float 1.5"), (-1, "int -1"), (True, "bool True"), ("2", "str '2'"), (None, "None")],
)
def test_a_size_that_is_none(size: Any, shown: str, says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.SizeError,
        f"""
        Modular (messages::modular): `N` is not a size
          argument: N
          expected: a whole number, zero or more
          got: {shown}
          where: {place}
          hint: call it as `Modular(M, N, ...)`
        """,
    ):
        Modular(3, size)


@pytest.mark.parametrize(
    ("dimension", "groups", "got"), [("M - 4", 1, "M = 3"), ("M // groups", 0, "M = 3, groups = 0")]
)
def test_a_dimension_that_comes_to_no_size(dimension: str, groups: int, got: str, says: Any) -> None:
    parameters = {"weight": ("N", dimension)}
    place = here()
    Modular = modular.module(**{**RIGHT, "parameters": parameters})
    with says(
        errors.SizeError,
        f"""
        Modular (messages::modular): `weight` has a dimension that is not a valid size
          argument: weight
          expected: {dimension}, zero or more
          got: {got}
          where: {place}
          hint: give different sizes
        """,
    ):
        Modular(3, 2, groups=groups)


def test_an_option_of_the_wrong_type(says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.ArgumentError,
        f"""
        Modular (messages::modular): `eps` has the wrong type
          argument: eps
          expected: float
          got: str 'small'
          where: {place}
          hint: call it as `Modular(M, N, eps=...)`
        """,
    ):
        Modular(3, 2, eps="small")


def test_a_flag_that_is_a_tensor(says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.ArgumentError,
        f"""
        Modular (messages::modular): `bias` must be True or False
          argument: bias
          expected: bool
          got: Tensor of torch.float32, shape [2]
          where: {place}
          hint: write `bias=False`; its values come from `init`, or from a state_dict
        """,
    ):
        Modular(3, 2, bias=torch.zeros(2))


@pytest.mark.parametrize(
    ("fill", "returned"),
    [(torch.zeros_like, "Tensor of torch.float32, shape [2, 3]"), (lambda weight: 0.0, "float 0.0")],
)
def test_an_initialiser_that_does_not_fill(fill: Any, returned: str, says: Any) -> None:
    place = here()
    Modular = modular.module(**{**RIGHT, "init": fill})
    with says(
        errors.InitializerError,
        f"""
        Modular (messages::modular): the initialiser of `weight` did not fill the tensor that it was given
          argument: weight
          expected: a function that fills its tensor in place
          got: `{fill.__name__}`, which returned {returned}
          where: {place}
          hint: write `opsmith.init.uniform(-0.1, 0.1)`, or a function whose name ends in `_`, such as `torch.nn.init.ones_`
        """,  # noqa: E501
    ):
        Modular(3, 2)


def test_an_initialiser_that_was_not_called() -> None:
    with pytest.raises(errors.InitializerError, match=r"`opsmith.init.uniform\(-0.1, 0.1\)`"):
        modular.module(**{**RIGHT, "init": opsmith.init.uniform})(3, 2)


def test_an_error_of_an_initialiser_says_which() -> None:
    with pytest.raises(ValueError, match="Fan in and fan out") as caught:
        modular.module(**{**RIGHT, "init": opsmith.init.xavier_uniform()})(3, 2)
    assert caught.value.__notes__ == ["while xavier_uniform(gain=1.0) filled `bias` [2] of Modular"]


def test_a_class_that_no_pickle_finds(says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.ModulePicklingError,
        f"""
        messages::modular: a pickle finds a class by its name, but `test_module_messages.test_a_class_that_no_pickle_finds.<locals>.Modular` is not there
          expected: `Modular` at the top of the module `test_module_messages`
          where: {place}
          hint: write `Modular = op.module(...)` there, or give the variable's name as `name=`; a state_dict needs no such name
        """,  # noqa: E501
    ):
        pickle.dumps(Modular(3, 2))


def test_a_lazy_module_is_not_pickled(says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.ModulePicklingError,
        f"""
        Modular (messages::modular): its parameters have no shape yet, and a pickle would lose their dtype and device
          where: {place}
          hint: call the module once before you pickle it
        """,  # noqa: E501
    ):
        pickle.dumps(Modular(None, 2))


def test_a_call_that_tells_no_size(says: Any) -> None:
    place = here()
    Modular = modular.module(**RIGHT)
    with says(
        errors.SizeError,
        f"""
        Modular (messages::modular): `M` does not follow from this call
          argument: M
          expected: a call with tensors of `x: B M, weight: N M, bias: N -> B N`
          where: {place}
          hint: give `M` when the module is made
        """,
    ):
        Modular(None, 2)(torch.tensor(1.0))


Other = modular.module(**RIGHT)
modular_again = modular.module(**RIGHT, name="Other")


def test_a_class_whose_name_is_anothers() -> None:
    assert pickle.loads(pickle.dumps(modular_again.plan.sizes)) == ("M", "N")
    with pytest.raises(errors.ModulePicklingError, match=r"`test_module_messages.Other` is another one"):
        pickle.dumps(modular_again(3, 2))
    with pytest.raises(errors.ModulePicklingError, match=r"`test_module_messages.Modular` is not there"):
        pickle.dumps(Other(3, 2))
