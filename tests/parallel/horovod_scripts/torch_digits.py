"""A training script as people write them for Horovod: only `horovod` is imported here."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--no-cuda", action="store_true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = hvd.SyncBatchNorm(8)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.out(self.dropout(x.flatten(1))), dim=1)


def stripes(n, seed):
    """Images of 8 x 8 whose class is where the bright rows or columns are."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = 0.3 * torch.randn(n, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels, strict=True):
        if label < 5:
            image[0, label : label + 2] += 1
        else:
            image[0, :, label - 5 : label - 3] += 1
    return TensorDataset(images, labels)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)

    train_set = stripes(512, 1)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_set = stripes(256, 2)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

    model = Net()
    scaler = hvd.size() if not args.use_adasum else 1
    if args.use_adasum and cuda and hvd.nccl_built():
        scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
        model.eval()
        loss = correct = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(1) == target).float().sum().item()
        loss = metric_average(loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(correct / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    try:
        main()
    except HorovodInternalError as error:
        raise SystemExit(str(error)) from error
