"""Train a small convolutional network on handwritten digits, on one or many ranks.

    python examples/torch_digits.py
    mpirun -np 2 python examples/torch_digits.py

The data are the 1,797 scans of 8 x 8 pixels that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvdlite_torch as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with hvdlite and PyTorch")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split in the same way on every rank."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = split

    def dataset(x, y) -> TensorDataset:
        pixels = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        return TensorDataset(pixels, torch.tensor(y, dtype=torch.int64))

    return dataset(train_x, train_y), dataset(test_x, test_y)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Return the share of test images that are recognised; every rank looks at its part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test_set.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    total = hvd.allreduce(correct.float(), name="correct", op=hvd.Sum)
    return total.item() / len(test_set)


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = make_model()
    # Together the ranks take batches that are hvd.size() times as large, and longer steps.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=0.9, weight_decay=1e-4
    )

    # All ranks begin with the state of the first one.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr * hvd.size(), epochs=args.epochs, steps_per_epoch=len(loader)
    )

    start = time.perf_counter()
    with tqdm(
        total=args.epochs * len(loader), unit="step", mininterval=0.5, disable=hvd.rank() != 0
    ) as bar:
        for epoch in range(args.epochs):
            model.train()
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
                loss.backward()
                optimizer.step()
                scheduler.step()
                bar.update()
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}")
    seconds = time.perf_counter() - start

    result = accuracy(model, test_set)
    if hvd.rank() == 0:
        images_seen = args.epochs * len(sampler) * hvd.size()
        print(f"{images_seen / seconds:.0f} images per second on {hvd.size()} rank(s)")
        print(f"accuracy: {100 * result:.1f} %")


if __name__ == "__main__":
    main()
