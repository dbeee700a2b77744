import torch, os, warnings, tempfile, pathlib
warnings.simplefilter("ignore")
from tests.processes import on_processes

def job(rank):
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from nemo_lowprec.megatron.parallel import ParallelLayout
    from nemo_lowprec.megatron.gradients import hold_in_fp8
    torch.cuda.current_device = lambda: "cpu"
    ParallelLayout().initialize()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False), torch.nn.Linear(64, 256, bias=False)).half()
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True, average_in_collective=True, pad_buckets_for_high_nccl_busbw=True, overlap_grad_reduce=True, bucket_size=1), net)
    hold_in_fp8(ddp)
    print([b.numel for b in ddp.buffers], len(ddp.bucket_groups))
    for step in range(2):
        ddp.zero_grad_buffer()
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(rank)).half()
        ddp(x).float().pow(2).mean().backward()
        ddp.finish_grad_sync()
    return [p.main_grad.dequantize() for p in net.parameters()]
if __name__ == "__main__":
    d = pathlib.Path(tempfile.mkdtemp())
    print([[t.abs().mean() for t in r] for r in on_processes(2, d, job)])
