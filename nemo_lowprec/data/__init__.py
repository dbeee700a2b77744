"""Text data for pretraining: a corpus, its tokenizer, Megatron's .bin/.idx files, and their loader.

corpus      lists the documents of a source, and splits them into training and validation documents
tokenizer   a byte-level BPE trained on the training documents
prepare     corpus -> tokenizer.json, train.bin/.idx, validation.bin/.idx, prepared.json
indexed     opens .bin/.idx pairs of Megatron and NeMo, and refuses broken pairs with the reason
packed      fixed-length samples packed from shuffled documents, in Megatron's own order
loader      a data loader whose position is part of the checkpoint
module      the LightningDataModule that prepares, opens and loads the data
"""

from nemo_lowprec.lazy import lazily

_HOME = {
    "Document": "corpus",
    "list_documents": "corpus",
    "split_documents": "corpus",
    "train_tokenizer": "tokenizer",
    "PreparedData": "prepare",
    "prepare_data": "prepare",
    "is_prepared": "prepare",
    "open_prepared": "prepare",
    "open_indexed": "indexed",
    "PackedDataset": "packed",
    "ResumableLoader": "loader",
    "validation_loader": "loader",
    "TextDataModule": "module",
}
__all__ = list(_HOME)

# Lazy, because Lightning, tokenizers and Megatron-core each take seconds to import.
__getattr__, __dir__ = lazily(__name__, _HOME)
