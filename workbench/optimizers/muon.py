"""Muon for the hidden matrices of a model, and AdamW for all other parameters, over sharded parameters.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/).

Each matrix is orthogonalised once, by one of the ranks that hold it or a part of it (its owner); matrices are shared
out by the FLOPs that they need. This is the division of microsoft/dion and of torchtitan's distributed Muon (its pull
request 4060 and those after it): an all-to-all brings the shards of a matrix to its owner, and a second one takes the
shards of the result back. Each moves a rank's own shards alone, in bf16. Moonlight (arXiv:2502.16982) all-gathers
every matrix to every rank instead, which then orthogonalises all of them. To shard whole matrices in place of rows,
so that FSDP2's all-gather of updated weights brought the results along, would need another sharding than FSDP2's, for
forwards and checkpoints too, and would save two bytes an element of the shard in a step.

Matrices of one shape are orthogonalised in one batch, by the Gram matrix of their shorter side. An iteration is three
batched products, and all that is done beside them is done to Gram matrices, none of them larger: the norm is taken from
the first of them, and each polynomial has its constant on its diagonal, so that the last product adds nothing. On a GPU
two kernels move all else (`workbench.optimizers.update_kernels`): one reads gradients and momenta and writes momenta
and directions, those of one batch beside each other, and one adds the results to the weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.capture.blocks.hidden_matrices import Projections
from workbench.optimizers.adamw import BATCH_ELEMENTS, ShardedAdamW
from workbench.optimizers.parameters import Arriving, MatrixExchange, OneRank, local, momentum_of
from workbench.sparsity.kernels.operators import runs_triton

MOMENTUM = 0.95
"""Momentum of `torch.optim.Muon`, by default with Nesterov's look-ahead."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, to which those of Muon are scaled so that both use one learning rate and decay
(arXiv:2502.16982; `adjust_lr_fn="match_rms_adamw"` of `torch.optim.Muon`)."""
SAFETY, EPS = 1.04, 1e-7
"""Factor and summand by which the norm that a matrix is divided by exceeds its own, and factor by which each iteration
takes singular values to be smaller than the polynomials allow.

Beyond 1 a polynomial grows with the fifth power, and the next ones with its fifth power again. In bf16 an iteration
erred by 1.2 % where the roundings of a row are all alike, as where one row has a third of a matrix's norm: with the
factor 1.01 of arXiv:2505.16932, rows of 1e4 and more came out (`test_no_norm_lets_a_row_of_a_matrix_explode`), and most
probably one such update destroyed a model on a GPU. The error of singular values is the same with both factors."""
COEFFICIENTS = tuple(
    (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
"""Coefficients of x, x^3 and x^5 in each iteration: the first five polynomials of Polar Express (arXiv:2505.16932,
algorithm 1). They take singular values of 0.001 to 1 to 1 with a root mean square error of 0.09, where five iterations
with the coefficients of `torch.optim.Muon` leave 0.21 (`test_polar_express_leaves_a_smaller_error…`)."""
Coefficients = Sequence[tuple[float, float, float]]


def working_type(device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices are orthogonalised and sent: bf16 on GPUs, and fp32 on CPUs.

    Few CPUs have bf16 units. Without them, a product of 1024 × 1024 in bf16 takes 6 to 70 times as long as in fp32.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalised(matrices: torch.Tensor, coefficients: Coefficients = COEFFICIENTS) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, approximately, of each matrix of a batch [B, m, n]."""
    x, is_wide = matrices, matrices.shape[1] <= matrices.shape[2]
    constant: float | torch.Tensor
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT) if is_wide else torch.bmm(x.mT, x)
        constant, linear = a, b
        if x is matrices:  # the trace of the Gram matrix is the square of the norm
            norms = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt()
            scales = (1 / (norms * SAFETY + EPS))[:, None]
            # With the scale s on both sides of the Gram matrix G and on the result, the polynomial is a square,
            # s (a + b s² G + c s⁴ G²) = c Q² + s (a - b² / 4c), where Q = s^2.5 G + s^0.5 b / 2c: of all elements, only
            # those of G are multiplied, and none are copied for the product to add to.
            gram.mul_(scales[:, :, None] ** 2.5).diagonal(dim1=1, dim2=2).add_(b / (2 * c) * scales.sqrt())
            constant, linear = (a - b * b / (4 * c)) * scales, 0.0
        polynomial = torch.baddbmm(gram, gram, gram, beta=linear, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(constant)
        x = torch.bmm(polynomial, x) if is_wide else torch.bmm(x, polynomial)
    return x


def orthogonalisation_flops(shape: Sequence[int], projections: Projections) -> float:
    """Return the FLOPs of the matrix products that orthogonalise the projections of a matrix.

    With m rows and n >= m columns, an iteration multiplies m·n by n·m, m·m by m·m, and m·m by m·n.
    """
    sides = [sorted(each) for each in projections.shapes(shape)]
    return sum(len(COEFFICIENTS) * (4.0 * m * m * n + 2.0 * m**3) for m, n in sides)


def gram_elements(shape: Sequence[int], projections: Projections) -> int:
    """Return the elements of the Gram matrices of the projections of a matrix."""
    return sum(min(each) ** 2 for each in projections.shapes(shape))


def shared_out(flops: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Return the rank that orthogonalises each matrix: the next largest one goes to the rank that has least to do.

    Graham's rule ends within 4/3 of the best division (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    Every rank finds the same.
    """
    loads, owners = [0.0] * ranks, {}
    for name in sorted(flops, key=lambda name: (-flops[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += flops[name]
    return owners


@dataclass(frozen=True)
class _Matrix:
    """A matrix that Muon updates."""

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    shape: tuple[int, int]
    """Shape of the whole matrix."""
    projections: Projections
    scales: tuple[float, ...]
    """Multiple of the rate of each projection's update."""
    is_apart: bool
    """True if it has a batch of its own."""


class MuonAndAdamW(ShardedAdamW):
    """Muon for the groups that have `orthogonal=True`, and AdamW for the others.

    The momentum of a matrix is sharded, or replicated, as the matrix is. Matrices are updated in rounds of about
    `BATCH_ELEMENTS` elements for each rank; while a round is orthogonalised, the next one is on its way.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        projections: Mapping[str, Projections],
        scale: str,
        exchange: MatrixExchange | None = None,
        apart: Collection[str] = (),
        **options: Any,
    ) -> None:
        """`projections` has an entry for each matrix, and `scale` is the experiment's `muon_scale`.

        `exchange` is needed where several ranks hold the matrices. Matrices that are `apart` are orthogonalised in
        batches of one, so that ranks which do not exchange results find the same bits.
        """
        super().__init__(groups, **options)
        self._projections, self._scale, self._apart = projections, scale, frozenset(apart)
        self._exchange: MatrixExchange = exchange or OneRank()
        self._matrices: dict[nn.Parameter, _Matrix] = {}
        self._due: list[_Matrix] = []
        self._rounds: tuple[list[str], list[list[list[_Matrix]]]] = ([], [])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._due = []
        loss = super().step(closure)
        if self._due:
            self._update_matrices(self._due)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not group["orthogonal"]:
            super()._update(parameters, group)
            return
        if parameters[0] not in self._matrices:
            for parameter, name in zip(group["params"], group["names"], strict=True):
                rows, columns = self._exchange.whole_shape(name, parameter)
                projections = self._projections[name]
                scales = tuple(update_scale(part, self._scale) for part in projections.shapes((rows, columns)))
                matrix = _Matrix(name, parameter, group, (rows, columns), projections, scales, name in self._apart)
                self._matrices[parameter] = matrix
        self._due += [self._matrices[parameter] for parameter in parameters]

    def _update_matrices(self, matrices: Sequence[_Matrix]) -> None:
        rounds, exchange = self._rounds_of(matrices), self._exchange
        names = [[[matrix.name for matrix in owned] for owned in members] for members in rounds]

        def sent(number: int) -> Arriving:
            """Start to bring one round's directions to their owners."""
            return exchange.to_owners(names[number], self._directions(number, rounds[number]))

        arriving, returning = sent(0), None
        for number, members in enumerate(rounds):
            whole = arriving()
            if number + 1 < len(rounds):
                arriving = sent(number + 1)
            started = exchange.from_owners(names[number], self._orthogonalised(members[exchange.rank], whole))
            if returning is not None:
                self._add(*returning)
            returning = number, members, started
        if returning is not None:
            self._add(*returning)

    def _directions(self, number: int, members: Sequence[Sequence[_Matrix]]) -> dict[str, torch.Tensor]:
        """Move this rank's momenta of a round's matrices; return the directions that it sends, beside each other."""
        sent = [m for owner, owned in enumerate(members) for m in owned if self._exchange.is_source(m.name, owner)]
        others = [
            m for owner, owned in enumerate(members) for m in owned if not self._exchange.is_source(m.name, owner)
        ]
        parameters = [matrix.parameter for matrix in (*sent, *others)]
        momenta = [local(momentum_of(self, parameter)) for parameter in parameters]
        sizes = [momentum.numel() for momentum in momenta[: len(sent)]]
        device = momenta[0].device
        buffer = torch.empty(sum(sizes), dtype=working_type(device), device=device)
        directions = [part.view_as(momentum) for part, momentum in zip(buffer.split(sizes), momenta, strict=False)]
        if not self._moved_by_kernel(number, parameters, momenta, buffer, sizes):
            gradients = self._scaled_gradients(parameters)
            if self.skips_update is not None:
                # Where an update is skipped, on the device, the momentum stands in for a gradient that may be NaN, and
                # so stays what it is. The host does not wait.
                skips = self.skips_update.bool()
                for momentum, gradient in zip(momenta, gradients, strict=True):
                    torch.where(skips, momentum, gradient, out=gradient)
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            if sent:
                ahead = torch._foreach_lerp(gradients[: len(sent)], momenta[: len(sent)], MOMENTUM)
                torch._foreach_copy_(directions, ahead)
        return {matrix.name: direction for matrix, direction in zip(sent, directions, strict=True)}

    def _moved_by_kernel(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        momenta: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        sizes: Sequence[int],
    ) -> bool:
        """Return True if our kernel has moved the momenta and written the directions, False if it cannot."""
        if not runs_triton(buffer):
            return False
        from workbench.optimizers.update_kernels import move_momenta

        table, gradients = self._table(2 * number), [local(p.grad) for p in parameters if p.grad is not None]
        scalars = {"factor": self.gradient_factor, "skips": self.skips_update}
        return move_momenta(table, gradients, momenta, buffer, sizes, MOMENTUM, **scalars)

    def _rounds_of(self, matrices: Sequence[_Matrix]) -> list[list[list[_Matrix]]]:
        """Return the matrices that each owner orthogonalises in each round; all ranks find the same."""
        names = [matrix.name for matrix in matrices]
        if names != self._rounds[0]:
            flops = {matrix.name: orthogonalisation_flops(matrix.shape, matrix.projections) for matrix in matrices}
            owners = shared_out(flops, self._exchange.ranks)
            alike = sorted(matrices, key=lambda m: (sorted(m.shape), m.shape, m.projections.sizes, names.index(m.name)))
            rounds: list[list[list[_Matrix]]] = []
            for owner in range(self._exchange.ranks):
                number, elements = 0, 0
                for matrix in alike:
                    if owners[matrix.name] != owner:
                        continue
                    size = math.prod(matrix.shape)
                    if elements and elements + size > BATCH_ELEMENTS:
                        number, elements = number + 1, 0
                    elements += size
                    if number == len(rounds):
                        rounds.append([[] for _ in range(self._exchange.ranks)])
                    rounds[number][owner].append(matrix)
            self._rounds = names, rounds
        return self._rounds[1]

    def _orthogonalised(
        self, matrices: Sequence[_Matrix], whole: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the updates of whole matrices for a rate of 1, by name."""
        batches: dict[Any, list[tuple[_Matrix, int, torch.Tensor]]] = defaultdict(list)
        updates: dict[str, list[torch.Tensor]] = {}
        for matrix in matrices:
            updates[matrix.name] = matrix.projections.split(whole[matrix.name])
            for index, part in enumerate(updates[matrix.name]):
                batches[matrix.name if matrix.is_apart else None, part.shape].append((matrix, index, part))
        for members in batches.values():
            found = orthogonalised(_stacked([part for _, _, part in members]))
            factors = [matrix.scales[index] / matrix.scales[0] for matrix, index, _ in members]
            if any(factor != 1 for factor in factors):
                found *= torch.tensor(factors, device=found.device, dtype=found.dtype)[:, None, None]
            for (matrix, index, _), update in zip(members, found.unbind(), strict=True):
                updates[matrix.name][index] = update
        return {matrix.name: matrix.projections.joined(updates[matrix.name]) for matrix in matrices}

    def _add(self, number: int, members: Sequence[Sequence[_Matrix]], arriving: Arriving) -> None:
        """Let this rank's shards of one round's matrices decay, and add their updates."""
        arrived = arriving()
        matrices = [matrix for owned in members for matrix in owned]
        shards, updates = [local(m.parameter) for m in matrices], [arrived[m.name] for m in matrices]
        rates = [matrix.group["lr"] * matrix.scales[0] for matrix in matrices]
        decays = [matrix.group["lr"] * matrix.group["weight_decay"] for matrix in matrices]
        if self._added_by_kernel(number, matrices, shards, updates, rates, decays):
            return
        kept = None if self.skips_update is None else 1 - self.skips_update
        for shard, update, rate, decay in zip(shards, updates, rates, decays, strict=True):
            if decay:
                shard.mul_(1 - (decay if kept is None else decay * kept))
            shard.add_(update if kept is None else update * kept.to(update.dtype), alpha=-rate)

    def _added_by_kernel(
        self,
        number: int,
        matrices: Sequence[_Matrix],
        shards: Sequence[torch.Tensor],
        updates: Sequence[torch.Tensor],
        rates: Sequence[float],
        decays: Sequence[float],
    ) -> bool:
        """Return True if our kernel has updated the shards, False if it cannot."""
        if not runs_triton(shards[0]):
            return False
        from workbench.optimizers.update_kernels import add_updates

        parameters = [matrix.parameter for matrix in matrices]
        table, copies = self._table(2 * number + 1), [self.copies.get(parameter) for parameter in parameters]
        is_added = add_updates(table, shards, updates, copies, rates, decays, skips=self.skips_update)
        if is_added:
            self._note_copies(parameters)
        return is_added


def _stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices of one shape as a batch [B, m, n]: a view of them where they lie beside each other."""
    first, base = matrices[0], matrices[0].untyped_storage().data_ptr()
    places = [(m.untyped_storage().data_ptr(), m.storage_offset()) if m.is_contiguous() else (0, 0) for m in matrices]
    if places == [(base, first.storage_offset() + index * first.numel()) for index in range(len(matrices))]:
        return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(matrices))


def update_scale(shape: tuple[int, int], scale: str) -> float:
    """Return the multiple of the rate with which an orthogonal matrix (outputs, inputs) updates the weights.

    `scale` is `workbench.Optimizer.muon_scale`. For `spectral` see Yang, Simon and Bernstein, "A spectral condition for
    feature learning" (arXiv:2310.17813), and `adjust_lr_fn="original"` of `torch.optim.Muon`.
    """
    outputs, inputs = shape
    return ADAMW_RMS * math.sqrt(max(shape)) if scale == "adamw_rms" else math.sqrt(max(1.0, outputs / inputs))
