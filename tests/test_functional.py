import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from naive import naive_margin_loss, naive_objective, naive_spread_loss, naive_squash, naive_update, naive_votes
from torchcaps import functional as F

B, I, J, D, E = 5, 7, 4, 3, 2
PENALTIES = {"l2": F.l2_penalty, "l1": F.l1_penalty}


def problem() -> tuple[torch.Tensor, ...]:
    poses = torch.randn(B, I, D, dtype=torch.float64)
    weight = torch.randn(I, D, J, E, dtype=torch.float64)
    coefficients = torch.randn(I, J, dtype=torch.float64)
    coefficients[2, 1] = 0.0  # where the sign of the L1 penalty is 0
    shown = F.presence(torch.randint(J, (B, 1)), J).double()
    return poses, weight, coefficients, shown


def test_squash_equals_the_formula():
    vectors = torch.randn(20, 6, dtype=torch.float64) * torch.logspace(-6, 6, 20, dtype=torch.float64)[:, None]
    expected = torch.stack([naive_squash(vector) for vector in vectors])
    torch.testing.assert_close(F.squash(vectors), expected, rtol=1e-14, atol=0)


def test_squash_passes_gradcheck():
    vectors = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    far = (30 * torch.randn(6, 4, dtype=torch.float64)).requires_grad_()  # where the largest component is divided out
    assert gradcheck(F.squash, vectors)
    assert gradcheck(F.squash, far)
    assert gradgradcheck(F.squash, vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-8, 1.0, 1e8, 1e30])
def test_squash_is_finite_at_every_scale(dtype, scale):
    vectors = torch.full((2, 8), scale, dtype=dtype)
    vectors[1] = 0
    vectors.requires_grad_()
    squashed = F.squash(vectors)
    squashed.sum().backward()
    assert squashed.isfinite().all()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()
    assert torch.linalg.vector_norm(squashed.float(), dim=-1).max() <= 1.01
    if scale >= 1e8:
        torch.testing.assert_close(torch.linalg.vector_norm(squashed[0].double()).item(), 1.0, rtol=0.01, atol=0)


def test_squash_of_zero_is_zero_with_zero_gradient():
    vector = torch.zeros(3, 4, requires_grad=True)
    squashed = F.squash(vector)
    squashed.sum().backward()
    assert not squashed.any()
    assert vector.grad is not None
    assert not vector.grad.any()


def test_activations_are_the_lengths_of_the_poses():
    capsules = F.capsules_from_totals(torch.randn(3, 5, 4, dtype=torch.float64))
    torch.testing.assert_close(capsules.activations, torch.linalg.vector_norm(capsules.poses, dim=-1))


def test_votes_equal_the_formula():
    poses, weight, _, _ = problem()
    torch.testing.assert_close(F.votes(poses, weight), naive_votes(poses, weight))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_presence_of_numbers(dtype):
    expected = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert F.presence(torch.tensor([2, 0], dtype=dtype), 3).tolist() == expected
    assert F.presence(torch.tensor([[2], [0]], dtype=dtype), 3).tolist() == expected
    assert F.presence(torch.tensor([[2, 1], [0, 0]], dtype=dtype), 3).tolist() == [[0, 1, 1], [1, 0, 0]]


def test_presence_where_fewer_classes_are_shown():
    labels = torch.tensor([[2, -1], [-1, -1], [-1, 0]])
    assert F.presence(labels, 3).tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert F.presence(torch.tensor([-1, 1]), 3).tolist() == [[0, 0, 0], [0, 1, 0]]


def test_presence_of_presence_is_itself():
    shown = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    assert F.presence(shown, 3) is shown
    assert F.presence(shown > 0, 3).tolist() == [[0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("labels", [torch.rand(3), torch.rand(2, 4), torch.zeros(2, 4, dtype=torch.bool),
                                    torch.zeros(2, 2, 2, dtype=torch.long), torch.tensor(1)])  # fmt: skip
def test_labels_of_another_shape_are_refused(labels):
    with pytest.raises(ValueError, match="must have shape"):
        F.presence(labels, 3)


@pytest.mark.parametrize("number", [3, 100, -2])
def test_a_class_that_there_is_not_is_refused(number):
    with pytest.raises(ValueError, match="class numbers from 0 to 2"):
        F.presence(torch.tensor([number]), 3)


@pytest.mark.parametrize("classes_shown", [1, 2, 3])
def test_margin_loss_equals_the_formula(classes_shown):
    lengths = torch.rand(6, 5, dtype=torch.float64)
    labels = torch.stack([torch.randperm(5)[:classes_shown] for _ in range(6)])
    shown = F.presence(labels, 5).double()
    assert shown.sum(1).eq(classes_shown).all()
    expected = pytest.approx(naive_margin_loss(lengths, shown), rel=1e-12)
    assert F.margin_loss(lengths, shown).item() == expected
    assert F.margin_loss(lengths, labels).item() == expected
    assert gradcheck(lambda x: F.margin_loss(x, shown), lengths.requires_grad_())


def test_margin_loss_of_one_number_for_each_image():
    lengths, labels = torch.rand(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    expected = naive_margin_loss(lengths, F.presence(labels, 5))
    assert F.margin_loss(lengths, labels).item() == pytest.approx(expected, rel=1e-12)


def test_margin_loss_is_zero_when_all_lengths_are_beyond_their_margins():
    assert F.margin_loss(torch.tensor([[0.95, 0.05]]), torch.tensor([[1.0, 0.0]])) == 0


def test_spread_loss_by_loops():
    activations, shown = torch.rand(3, 4), torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1.0]])
    expected = pytest.approx(naive_spread_loss(activations, shown, 0.4))
    assert F.spread_loss(activations, shown, margin=0.4).item() == expected
    assert F.spread_loss(activations, torch.tensor([[0, -1], [1, 2], [3, -1]]), margin=0.4).item() == expected


def test_the_margin_grows_and_then_stays():
    margins = [F.spread_margin(step / 9) for step in range(12)]
    assert margins[0] == 0.2
    assert margins[9:] == pytest.approx([0.9, 0.9, 0.9])
    assert margins == sorted(margins)


def test_reconstruction_loss_sums_over_pixels_and_averages_over_images():
    drawn, target = torch.rand(3, 1, 1, 4, 4), torch.rand(3, 1, 1, 4, 4)
    expected = sum(((drawn[k] - target[k]) ** 2).sum() for k in range(3)) / 3
    torch.testing.assert_close(F.reconstruction_loss(drawn, target), expected)


def test_class_signs_are_plus_one_for_every_class_shown():
    shown = F.presence(torch.tensor([[0, 3], [1, 2]]), 4)
    assert F.class_signs(shown).tolist() == [[1, -1, -1, 1], [-1, 1, 1, -1]]


def test_balanced_signs_sum_to_zero():
    shown = F.presence(torch.tensor([[0, 3], [1, 2]]), 10)
    signs = F.class_signs(shown, balanced=True)
    torch.testing.assert_close(signs.sum(1), torch.zeros(2))
    assert signs[0, 0] == 1


def test_class_powers_by_loops():
    totals, shown = torch.randn(B, J, E, dtype=torch.float64), F.presence(torch.arange(B) % J, J).double()
    right, wrong = F.class_powers(totals, shown)
    for j in range(J):
        squares = [sum(float(component) ** 2 for component in totals[k, j]) for k in range(B)]
        for power, there in ((right, True), (wrong, False)):
            expected = sum(square for k, square in enumerate(squares) if bool(shown[k, j]) == there) / B
            assert power[j].item() == pytest.approx(expected, rel=1e-12)


def test_ratio_signs_are_the_slopes_of_the_logarithms():
    shown = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    right, wrong = torch.tensor([0.5, 2.0, 0.0]), torch.tensor([4.0, 0.25, 1.0])
    assert F.ratio_signs(shown, right, wrong).tolist() == [[2.0, -4.0, 0.0], [-0.25, 0.5, 0.0]]


@pytest.mark.parametrize("penalty", ["l2", "l1"])
def test_routing_objective_equals_the_formula(penalty):
    poses, weight, coefficients, shown = problem()
    votes = naive_votes(poses, weight)
    signs = F.class_signs(shown)
    totals = torch.einsum("bije,ij->bje", votes, coefficients)
    objective = F.routing_objective(totals, signs, [PENALTIES[penalty](coefficients, 0.3)], reduction="sum")
    torch.testing.assert_close(objective, naive_objective(votes, coefficients, signs, penalty, 0.3))


@pytest.mark.parametrize("penalty", ["l2", "l1"])
@pytest.mark.parametrize("balanced", [False, True])
def test_closed_form_update_equals_the_paper(penalty, balanced):
    poses, weight, coefficients, shown = problem()
    signs = F.class_signs(shown, balanced=balanced)
    direction = F.ascent_direction(poses, weight, coefficients, signs, penalty=penalty, strength=0.3, reduction="sum")
    expected = naive_update(naive_votes(poses, weight), coefficients, signs, penalty, 0.3, gamma=0.01)
    torch.testing.assert_close(coefficients + 0.01 * direction, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("penalty", ["l2", "l1"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_closed_form_update_equals_automatic_differentiation(penalty, reduction):
    poses, weight, coefficients, shown = problem()
    signs = F.class_signs(shown)
    direction = F.ascent_direction(
        poses, weight, coefficients, signs, penalty=penalty, strength=0.3, reduction=reduction
    )
    coefficients.requires_grad_()
    totals = torch.einsum("bije,ij->bje", F.votes(poses, weight), coefficients)
    objective = F.routing_objective(totals, signs, [PENALTIES[penalty](coefficients, 0.3)], reduction=reduction)
    (gradient,) = torch.autograd.grad(objective, coefficients)
    torch.testing.assert_close(direction, gradient, rtol=1e-12, atol=1e-12)


def test_a_step_with_the_mean_is_the_papers_with_gamma_divided_and_lambda_multiplied_by_the_batch():
    poses, weight, coefficients, shown = problem()
    signs = F.class_signs(shown)
    mean = F.ascent_direction(poses, weight, coefficients, signs, penalty="l2", strength=0.3)
    total = F.ascent_direction(poses, weight, coefficients, signs, penalty="l2", strength=0.3 * B, reduction="sum")
    torch.testing.assert_close(mean, total / B)


def test_routing_objective_passes_gradcheck():
    poses, weight, coefficients, shown = problem()
    signs = F.class_signs(shown)

    def objective(b: torch.Tensor, u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        totals = torch.einsum("bije,ij->bje", F.votes(u, w), b)
        return F.routing_objective(totals, signs, [F.l2_penalty(b, 0.1)])

    assert gradcheck(objective, [tensor.requires_grad_() for tensor in (coefficients, poses, weight)])


def test_unknown_names_raise_and_list_the_valid_ones():
    totals, signs = torch.zeros(1, 2, 3), torch.ones(1, 2)
    poses, weight, coefficients = torch.zeros(1, 4, 3), torch.zeros(4, 3, 2, 3), torch.ones(4, 2)
    with pytest.raises(ValueError, match="'l2' or 'l1'"):
        F.ascent_direction(poses, weight, coefficients, signs, penalty="l3", strength=0)
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        F.ascent_direction(poses, weight, coefficients, signs, penalty="l2", strength=0, reduction="max")
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        F.discriminative_power(totals, signs, reduction="max")
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        F.routing_objective(totals, signs, reduction="max")


def test_presence_of_two_classes_as_whole_numbers_is_noticed():
    with pytest.raises(ValueError, match="look like presence"):
        F.presence(torch.tensor([[0, 0], [1, 0], [1, 1]]), 2)
    assert F.presence(torch.tensor([[0, 1], [1, 0]]), 2).tolist() == [[1, 1], [1, 1]]
    assert F.presence(torch.tensor([[0], [0]]), 1).tolist() == [[1], [1]]


def test_gradients_image_by_image():
    activations, labels = torch.rand(5, 3), torch.tensor([0, 1, 2, 0, 1])

    def loss(lengths, label):
        return F.margin_loss(lengths[None], label[None])

    each = torch.func.vmap(torch.func.grad(loss))(activations, labels)
    together = torch.func.grad(lambda lengths: 5 * F.margin_loss(lengths, labels))(activations)
    torch.testing.assert_close(each, together)


def test_forward_mode_differentiation_sees_ordinary_operations():
    with torch.autograd.forward_ad.dual_level():
        assert not F.runs_eagerly()
    assert F.runs_eagerly()
