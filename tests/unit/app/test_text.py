"""The language model's text: windows, training, validation and test parts, and other texts."""

import pytest
import torch

from app.text import TextDataModule


def prepared(**settings):
    """Return a data module after setup."""
    data = TextDataModule(**settings)
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def plain():
    """Return the default text in windows of 64 bytes."""
    return prepared()


def joined(part, index=0):
    """Return the text of a part, joined from its windows' tokens (0) or targets (1)."""
    return bytes(torch.cat([sample[index] for sample in part]).tolist())


def test_the_default_text_is_the_language_reference(plain):
    """The default text has over 200 KB of English without a download; validation and test each get a tenth."""
    text = joined(plain.train_dataset).decode(errors="replace")
    assert len(text) > 200_000
    assert 'The "assert" statement' in text
    assert len(plain.val_dataset) == pytest.approx(len(plain.train_dataset) / 8, rel=0.01)
    assert len(plain.test_dataset) == pytest.approx(len(plain.train_dataset) / 8, rel=0.01)


def test_each_target_is_the_byte_that_follows(plain):
    """Targets are the tokens shifted by one byte, even across windows."""
    assert joined(plain.val_dataset, 1)[:-1] == joined(plain.val_dataset)[1:]
    tokens, targets = plain.val_dataset[0]
    assert tokens.shape == targets.shape == (64,)
    assert tokens.dtype == targets.dtype == torch.int64


def test_no_text_is_in_two_parts(tmp_path):
    """Training, validation and test use the beginning, the middle and the end of the text."""
    text = bytes(range(200))
    (tmp_path / "one.txt").write_bytes(text)
    data = prepared(data_dir=str(tmp_path), context=3)
    assert joined(data.train_dataset) == text[:159]
    assert joined(data.val_dataset) == text[160:178]
    assert joined(data.test_dataset) == text[180:198]


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    """All *.txt files of a folder form one text, in the same order on every host; other files are ignored."""
    for name, text in (("b.txt", b"second" * 20), ("a.txt", b"first!" * 20), ("c.json", b"{}")):
        (tmp_path / name).write_bytes(text)
    data = prepared(data_dir=str(tmp_path), context=1)
    assert joined(data.train_dataset).startswith(b"first!" * 20 + b"\n\n" + b"second")
    assert b"{}" not in joined(data.test_dataset)


def test_a_folder_without_text_is_refused(tmp_path):
    """A folder without text raises an error that names it and the fix."""
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no \*\.txt file\. Put the text there, or omit"):
        prepared(data_dir=str(tmp_path))


def test_a_text_without_a_whole_window_is_refused(tmp_path):
    """A text that is too short raises an error with its length, its smallest part's length and the window."""
    (tmp_path / "short.txt").write_bytes(b"x" * 640)
    with pytest.raises(ValueError, match=r"has 640 bytes, the smallest of its parts 64: too few .* context=64"):
        prepared(data_dir=str(tmp_path))
    assert len(prepared(data_dir=str(tmp_path), context=63).val_dataset) == 1


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict", None])
def test_each_stage_has_its_loader(stage):
    """After setup for any stage, that stage's loader returns batches."""
    data = TextDataModule(batch_size=4, context=16)
    data.setup(stage)
    loaders = {"fit": data.train_dataloader, "test": data.test_dataloader, "predict": data.predict_dataloader}
    tokens, targets = next(iter(loaders.get(stage, data.val_dataloader)()))
    assert tokens.shape == targets.shape == (4, 16)
    assert int(tokens.max()) < data.num_tokens


def test_only_training_drops_the_smaller_last_batch(plain):
    """Validation and test use all windows; training drops a smaller last batch by default."""
    assert len(plain.train_dataloader()) == len(plain.train_dataset) // 32
    assert sum(len(tokens) for tokens, _ in plain.val_dataloader()) == len(plain.val_dataset)
    assert len(prepared(drop_last=False).train_dataloader()) == -(-len(plain.train_dataset) // 32)
