"""What a training process on a GPU imports while it trains: a fork server that has imported this starts one at once."""

from importlib import import_module

from nemo_lowprec.megatron.requirements import check_transformer_engine

check_transformer_engine("Trials on GPUs need Transformer Engine")  # before anything loads cuDNN
for _name in ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing", "nemo_lowprec.megatron.engine"):
    import_module(_name)
