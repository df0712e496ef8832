"""The plan of the buckets. Their reductions are tested with the optimizer."""

from __future__ import annotations

import torch

from spotfit.horovod.torch.gradient_buckets import plan_buckets

MIB = 2**18
"""Numbers of float32 in one MiB."""


def test_buckets_begin_with_the_last_parameter_and_a_small_bucket() -> None:
    sizes = (10 * MIB, 20 * MIB, 2 * MIB, MIB // 2, MIB // 2)
    parameters = [torch.empty(size) for size in sizes]
    buckets = plan_buckets(parameters, None)
    assert [[one.numel() for one in bucket] for bucket in buckets] == [
        [MIB // 2, MIB // 2],
        [2 * MIB, 20 * MIB, 10 * MIB],
    ]


def test_a_bucket_has_one_dtype() -> None:
    parameters = [torch.empty(2), torch.empty(2, dtype=torch.float16), torch.empty(3)]
    buckets = plan_buckets(parameters, None)
    assert [len({one.dtype for one in bucket}) for bucket in buckets] == [1, 1]
    assert sum(map(len, buckets)) == 3


def test_a_number_of_groups_divides_the_parameters() -> None:
    parameters = [torch.empty(size) for size in range(1, 6)]
    buckets = plan_buckets(parameters, 2)
    assert [[one.numel() for one in bucket] for bucket in buckets] == [[5, 4, 3], [2, 1]]


def test_given_groups_are_reduced_once_all_their_gradients_are_ready() -> None:
    one, two, three, four = (torch.empty(size) for size in range(1, 5))
    buckets = plan_buckets([one, two, three, four], [[one, four], [two]])
    # In the order of the last gradient of each group; parameter three has a bucket of its own.
    assert [[each.numel() for each in bucket] for bucket in buckets] == [[3], [2], [1, 4]]


def test_groups_may_name_parameters_of_other_optimizers() -> None:
    own, other = torch.empty(1), torch.empty(2)
    assert plan_buckets([own], [[other], [own, other]]) == [[own]]


def test_no_parameters_need_no_buckets() -> None:
    assert plan_buckets([], None) == plan_buckets([], 2) == []
