"""A tiny model of each family that people train, with one batch: 34 of transformers and 10 of timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

_WIDTH, _HEADS, _LAYERS, _VOCABULARY, _LENGTH, _BATCH = 64, 4, 2, 96, 16, 4
_IMAGE = 32

Batch = dict[str, Tensor]

_PLAIN: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": 2 * _LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": _HEADS // 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BART: dict[str, Any] = {
    "d_model": _WIDTH,
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": 2 * _WIDTH,
    "decoder_ffn_dim": 2 * _WIDTH,
    "dropout": 0.0,
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_TEXT = {k: v for k, v in _PLAIN.items() if k != "max_position_embeddings"} | {"max_position_embeddings": _LENGTH}
_VISION: dict[str, Any] = {
    "image_size": _IMAGE,
    "patch_size": 8,
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
}


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _tokens() -> Tensor:
    return torch.randint(4, _VOCABULARY, (_BATCH, _LENGTH), generator=_drawn())


def _text() -> Batch:
    """Tokens, and the same as labels: what a language model takes, and a masked one without masks."""
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked() -> Batch:
    tokens = _tokens()
    hidden = torch.rand(tokens.shape, generator=_drawn()) < 0.3
    padding = torch.ones_like(tokens)
    padding[0, -3:] = 0
    labels = tokens.masked_fill(~hidden | (padding == 0), -100)
    return {"input_ids": tokens.masked_fill(hidden, 3), "labels": labels, "attention_mask": padding}


def _pixels(count: int = _BATCH, size: int = _IMAGE) -> Tensor:
    return torch.randn(count, 3, size, size, generator=_drawn())


def images() -> Batch:
    """Images [4, 3, 32, 32] and their classes."""
    return {"pixel_values": _pixels(), "labels": torch.arange(_BATCH)}


def _more_images() -> Batch:
    """Images [16, 3, 64, 64]: batch norms over the 4 values of a channel would scale up all roundings."""
    return {"pixel_values": _pixels(16, 64), "labels": torch.arange(16) % 8}


def _pairs() -> Batch:
    """Images and their captions."""
    return {"pixel_values": _pixels(), "input_ids": _tokens(), "return_loss": True}  # type: ignore[dict-item]


def _translated() -> Batch:
    return {"input_ids": _tokens(), "labels": _tokens().flip(1)}


def _spectrogram() -> Batch:
    return {"input_features": torch.randn(_BATCH, 16, 2 * _LENGTH, generator=_drawn()), "labels": _tokens()}


def _speech() -> Batch:
    return {"input_values": torch.randn(_BATCH, 640, generator=_drawn()), "labels": torch.arange(_BATCH)}


def _questions() -> Batch:
    """Text in which an image stands: 16 patches, each at a token of its own."""
    tokens = torch.cat([torch.full((_BATCH, 16), 3), _tokens()], 1)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 3, -100), "pixel_values": _pixels()}


def _clip(config: Any) -> Any:
    return config(
        text_config={**_TEXT, "projection_dim": _WIDTH},
        vision_config={**_VISION, "projection_dim": _WIDTH},
        projection_dim=_WIDTH,
    )


def _llava() -> nn.Module:
    text = tf.LlamaConfig(**{**_GROUPED, "max_position_embeddings": 64})
    config = tf.LlavaConfig(vision_config=tf.CLIPVisionConfig(**_VISION), text_config=text, image_token_index=3)
    return tf.LlavaForConditionalGeneration(config)


def _plain(name: str, model: str = "ForCausalLM", config: str = "", **own: Any) -> Callable[[], nn.Module]:
    """Makes the model ``model`` of the family whose classes begin with ``name``."""
    return lambda: getattr(tf, name + model)(getattr(tf, config or f"{name}Config")(**own))


_CLASSES = {"num_labels": 8}

FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "llama": (_plain("Llama", **_GROUPED), _text),
    "mistral": (_plain("Mistral", **_GROUPED, sliding_window=8), _text),
    "qwen2": (_plain("Qwen2", **_GROUPED), _text),
    "qwen3": (_plain("Qwen3", **_GROUPED, head_dim=16), _text),
    "gemma2": (_plain("Gemma2", **_GROUPED, head_dim=16, sliding_window=8), _text),
    "gemma3": (_plain("Gemma3", config="Gemma3TextConfig", **_GROUPED, head_dim=16, sliding_window=8), _text),
    "phi3": (_plain("Phi3", **_GROUPED), _text),
    "gpt2": (_plain("GPT2", "LMHeadModel", vocab_size=_VOCABULARY, n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS,
                    n_positions=_LENGTH, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), _text),
    "gpt_neox": (_plain("GPTNeoX", **_PLAIN), _text),
    "opt": (_plain("OPT", **_PLAIN, ffn_dim=2 * _WIDTH, word_embed_proj_dim=_WIDTH, dropout=0.0), _text),
    "bloom": (_plain("Bloom", vocab_size=_VOCABULARY, hidden_size=_WIDTH, n_layer=_LAYERS, n_head=_HEADS), _text),
    "falcon": (_plain("Falcon", **_PLAIN), _text),
    "olmo2": (_plain("Olmo2", **_GROUPED), _text),
    "granite": (_plain("Granite", **_GROUPED), _text),
    "cohere": (_plain("Cohere", **_GROUPED, logit_scale=1.0), _text),
    "mixtral": (_plain("Mixtral", **_GROUPED, num_local_experts=4), _text),
    "qwen3_moe": (_plain("Qwen3Moe", **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=_WIDTH), _text),
    "mamba2": (_plain("Mamba2", vocab_size=_VOCABULARY, hidden_size=_WIDTH, num_hidden_layers=_LAYERS, num_heads=32,
                      head_dim=4, state_size=16, n_groups=1, chunk_size=8, pad_token_id=0, bos_token_id=1,
                      eos_token_id=2), _text),
    "bert": (_plain("Bert", "ForMaskedLM", **_PLAIN, **_NO_DROPOUT), _masked),
    "roberta": (_plain("Roberta", "ForMaskedLM", **_PLAIN, **_NO_DROPOUT), _masked),
    "electra": (_plain("Electra", "ForMaskedLM", **_PLAIN, **_NO_DROPOUT, embedding_size=32), _masked),
    "deberta_v2": (_plain("DebertaV2", "ForMaskedLM", **_PLAIN, **_NO_DROPOUT, relative_attention=True,
                          pos_att_type=["p2c", "c2p"]), _masked),
    "modernbert": (_plain("ModernBert", "ForMaskedLM", **_PLAIN, local_attention=8), _masked),
    "t5": (_plain("T5", "ForConditionalGeneration", vocab_size=_VOCABULARY, d_model=_WIDTH, d_kv=16, d_ff=2 * _WIDTH,
                  num_layers=_LAYERS, num_heads=_HEADS, dropout_rate=0.0, decoder_start_token_id=0), _translated),
    "bart": (_plain("Bart", "ForConditionalGeneration", **_BART, max_position_embeddings=2 * _LENGTH), _translated),
    "whisper": (_plain("Whisper", "ForConditionalGeneration", **_BART, num_mel_bins=16, max_source_positions=_LENGTH,
                       max_target_positions=_LENGTH), _spectrogram),
    "wav2vec2": (_plain("Wav2Vec2", "ForSequenceClassification", **_PLAIN, **_CLASSES, conv_dim=(32, 32),
                        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, hidden_dropout=0.0,
                        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
                        layerdrop=0.0, mask_time_prob=0.0, num_conv_pos_embeddings=8,
                        num_conv_pos_embedding_groups=4, classifier_proj_size=32), _speech),
    "vit": (_plain("ViT", "ForImageClassification", **_VISION, **_CLASSES), images),
    "swin": (_plain("Swin", "ForImageClassification", **_CLASSES, image_size=_IMAGE, patch_size=4, embed_dim=32,
                    depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0), images),
    "dinov2": (_plain("Dinov2", "ForImageClassification", **_VISION, **_CLASSES, mlp_ratio=2), images),
    "convnext": (_plain("ConvNext", "ForImageClassification", **_CLASSES, image_size=_IMAGE, hidden_sizes=[32, 64],
                        depths=[2, 2], num_stages=2), images),
    "clip": (lambda: tf.CLIPModel(_clip(tf.CLIPConfig)), _pairs),
    "siglip": (lambda: tf.SiglipModel(_clip(tf.SiglipConfig)), _pairs),
    "llava": (_llava, _questions),
}  # fmt: skip


def _timm(name: str, **own: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=8, **own)

    return make


_BLOCKS: dict[str, Any] = {
    "img_size": _IMAGE,
    "embed_dim": _WIDTH,
    "patch_size": 8,
    "depth": _LAYERS,
    "num_heads": _HEADS,
}

# Need torchvision, whose package on PyPI does not load beside torch without CUDA.
TIMM: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "timm vit": (_timm("vit_base_patch16_224", **_BLOCKS), images),
    "timm deit3": (_timm("deit3_base_patch16_224", **_BLOCKS), images),
    "timm beit": (_timm("beit_base_patch16_224", **_BLOCKS), images),
    "timm eva02": (_timm("eva02_base_patch14_224", **_BLOCKS), images),
    "timm swin": (_timm("swin_tiny_patch4_window7_224", img_size=_IMAGE, patch_size=4, embed_dim=32, depths=(2, 2),
                        num_heads=(2, 4), window_size=4, drop_path_rate=0.0), images),
    "timm mixer": (_timm("mixer_s16_224", img_size=_IMAGE), images),
    "timm convnext": (_timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), drop_path_rate=0.0), images),
    "timm resnet": (_timm("resnet50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)), images),
    "timm efficientnet": (_timm("efficientnet_b0", drop_rate=0.0, drop_path_rate=0.0), _more_images),
    "timm mobilenetv3": (_timm("mobilenetv3_small_050", drop_rate=0.0), _more_images),
}  # fmt: skip


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """What transformers' own forward returns as the loss, or the cross entropy of timm's classes."""
    if type(model).__module__.partition(".")[0] != "timm":
        return model(**batch).loss  # type: ignore[no-any-return]
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


# Learning rates at which FP32's own loss falls without a jump.
_RATES = {"timm efficientnet": 1e-4, "timm mobilenetv3": 1e-4, "clip": 1e-3, "wav2vec2": 1e-3, "whisper": 1e-3}


def rate_of(family: str) -> float:
    """AdamW's learning rate."""
    return _RATES.get(family, 1e-3 if family in TIMM else 3e-3)


# Why linear layers and other matrices are left in half precision: in any family, and in these.
_LEFT_ANYWHERE = ("the head", "a parameter of Conv", "a side of")
_LEFT = {
    "falcon": ("FalconLinear has a forward of its own",),
    "mixtral": ("a parameter of Mixtral",),
    "qwen3_moe": ("a parameter of Qwen3Moe",),
    "swin": ("a parameter of Swin",),
    "siglip": ("a parameter of Siglip",),
    "wav2vec2": ("computed by a parametrization",),
    "convnext": ("ConvNextLayerNorm computes neither",),
    "timm vit": ("a parameter of VisionTransformer",),
    "timm deit3": ("a parameter of VisionTransformer",),
    "timm beit": ("a parameter of Attention", "a parameter of Beit"),
    "timm eva02": ("a parameter of Eva",),
    "timm swin": ("a parameter of WindowAttention",),
    "timm convnext": ("LayerNorm2d computes neither",),
}


def may_stay(family: str, reason: str) -> bool:
    """Whether something of the family may be left in half precision for this reason."""
    return reason.startswith(_LEFT_ANYWHERE + _LEFT.get(family, ()))
