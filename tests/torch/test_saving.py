"""A checkpoint is rank 0's file, the same on all ranks, and whole or not there."""

import pytest
import torch

import nc10d.torch
from nc10d.testing import run_local


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        own = torch.Generator().manual_seed(10 * rank + step)
        model(torch.randn(4, 3, generator=own)).square().sum().backward()
        optimizer.step()
    return [x.detach().clone() for x in model.parameters()]


def made():
    model = nc10d.torch.DistributedDataParallel(torch.nn.Linear(3, 2))
    return model, torch.optim.Adam(model.parameters(), 0.1)


def test_a_resumed_job_goes_on_as_if_it_had_not_ended(tmp_path):
    path = tmp_path / "state.pt"

    def run(group):
        model, optimizer = made()
        train(model, optimizer, group.rank, range(2))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
        nc10d.torch.save(state if group.rank == 0 else None, path)
        assert path.exists()
        whole = train(model, optimizer, group.rank, range(2, 4))
        model, optimizer = made()
        found = nc10d.torch.load(path)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        resumed = train(model, optimizer, group.rank, range(found["step"], 4))
        return all(map(torch.equal, whole, resumed))

    assert run_local(run, 2) == [True] * 2
    assert [x.name for x in tmp_path.iterdir()] == ["state.pt"]


class Refuses:
    def __reduce__(self):
        raise ValueError("not this one")


def test_what_rank_0_cannot_do_is_an_error_on_every_rank(tmp_path):
    whole, nowhere = tmp_path / "whole.pt", tmp_path / "none" / "state.pt"

    def run(group):
        nc10d.torch.save({"step": 1}, whole)
        with pytest.raises(OSError, match=r"could not read .*state\.pt|No such file"):
            nc10d.torch.load(nowhere)
        with pytest.raises((OSError, RuntimeError), match=r"none"):
            nc10d.torch.save({}, nowhere)
        with pytest.raises((OSError, ValueError), match="not this one"):
            nc10d.torch.save(Refuses(), whole)
        return nc10d.torch.load(whole)

    assert run_local(run, 2) == [{"step": 1}] * 2
    assert [x.name for x in tmp_path.iterdir()] == ["whole.pt"]
