//! Makes a data set from text files.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use skein_protocol::id::Hash;
use skein_protocol::limits::SHARD_BYTES_MAX;
use skein_protocol::manifest::{DataManifest, FORMAT, FileEntry, Shard, Split};

use super::DataError;
use super::store::{save_file, save_manifest};
use super::tokenizer::{Tokenizer, TokenizerSpec, line_start_after};

/// Tokens of a shard where the user does not say: 8 MiB of two-byte tokens.
pub const SHARD_TOKENS: u64 = 4 * 1024 * 1024;
/// A tokenizer is trained on at most so much text, taken evenly.
const TRAINING_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// The text for training a tokenizer is taken in pieces of so many bytes.
const TRAINING_PIECE_BYTES: u64 = 64 * 1024;
/// Text is read in pieces of about so many bytes.
const READ_BYTES: u64 = 4 * 1024 * 1024;
/// Where nothing is held out by the user, one part in so many is: the end of the text.
const HELD_OUT_PART: u64 = 20;
/// How far after the cut a paragraph's end is looked for.
const PARAGRAPH_BYTES_MAX: u64 = 64 * 1024;

/// What to make a data set of.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// The folder that gets the data set; it may hold others.
    pub out: PathBuf,
    /// The tokenizer.
    pub tokenizer: TokenizerSpec,
    /// UTF-8 text to learn from, in order.
    pub train: Vec<PathBuf>,
    /// UTF-8 text to hold out; if there is none, the last 5% of `train` are held out.
    pub valid: Vec<PathBuf>,
    /// Tokens of a shard; the last of a split may have fewer.
    pub shard_tokens: u64,
}

/// How far the building is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildProgress {
    /// What is being done.
    pub doing: &'static str,
    /// Bytes of text done.
    pub done: u64,
    /// Bytes of text in all.
    pub total: u64,
}

/// Builds a data set and returns its manifest; its name is [`DataManifest::name`]. The manifest is
/// written last: where it is, the data set is complete. The same text and options give the same
/// name.
pub fn build(options: &BuildOptions, progress: &mut dyn FnMut(BuildProgress)) -> Result<DataManifest, DataError> {
    let mut train = options.train.iter().map(|path| Part::whole(path)).collect::<Result<Vec<_>, _>>()?;
    let mut valid = options.valid.iter().map(|path| Part::whole(path)).collect::<Result<Vec<_>, _>>()?;
    if valid.is_empty() {
        valid = hold_out_end(&mut train)?;
    }
    let tokenizer = match &options.tokenizer {
        TokenizerSpec::Bytes => Tokenizer::bytes(),
        TokenizerSpec::File(path) => Tokenizer::load(path)?,
        TokenizerSpec::Bpe(vocab_size) => {
            let total = total_bytes(&train).min(TRAINING_BYTES_MAX);
            progress(BuildProgress { doing: "training the tokenizer", done: 0, total });
            Tokenizer::train_bpe(*vocab_size, &sample(&train)?)?
        }
    };
    let json = tokenizer.to_json();
    let entry = FileEntry { hash: Hash::of(&json), bytes: json.len() as u64 };
    save_file(&options.out, entry.hash, &json)?;

    let token_bytes = DataManifest::token_bytes_for(tokenizer.vocab_size());
    let shard_tokens = options.shard_tokens.clamp(1, SHARD_BYTES_MAX / u64::from(token_bytes));
    let mut writer =
        Writer { out: &options.out, tokenizer: &tokenizer, token_bytes, shard_tokens, done: 0, total: total_bytes(&train) + total_bytes(&valid), progress };
    let (train, valid) = (writer.split(&train)?, writer.split(&valid)?);
    let manifest = DataManifest { format: FORMAT, vocab_size: tokenizer.vocab_size(), token_bytes, tokenizer: entry, train, valid };
    manifest.validate().map_err(DataError::TooLarge)?;
    save_manifest(&options.out, manifest.name(), &manifest.to_bytes())?;
    Ok(manifest)
}

/// A part of a text file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    path: PathBuf,
    range: Range<u64>,
}

impl Part {
    fn whole(path: &Path) -> Result<Self, DataError> {
        let metadata = std::fs::metadata(path).map_err(DataError::io(path))?;
        if !metadata.is_file() {
            return Err(DataError::Text { path: path.to_owned(), problem: "not a file: name the text files themselves".to_owned() });
        }
        Ok(Self { path: path.to_owned(), range: 0..metadata.len() })
    }

    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Reads some bytes, fewer at the end of the part.
    fn read(&self, from: u64, count: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        let read = (|| {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(from))?;
            file.take(count.min(self.range.end.saturating_sub(from))).read_to_end(&mut bytes)
        })();
        read.map_err(DataError::io(&self.path))?;
        Ok(bytes)
    }

    /// Calls `each` with the text in pieces, cut where a tokenizer cuts too.
    fn pieces(&self, mut each: impl FnMut(&str) -> Result<(), DataError>) -> Result<(), DataError> {
        let mut at = self.range.start;
        let mut rest = Vec::new();
        while at < self.range.end {
            let more = self.read(at, READ_BYTES)?;
            if more.is_empty() {
                return Err(DataError::Text { path: self.path.clone(), problem: "became shorter while it was read: try again".to_owned() });
            }
            at += more.len() as u64;
            rest.extend_from_slice(&more);
            let text = match std::str::from_utf8(&rest) {
                Ok(text) => text,
                // A character cut by the end of this piece goes on in the next.
                Err(error) if error.error_len().is_none() && at < self.range.end => {
                    std::str::from_utf8(&rest[..error.valid_up_to()]).expect("just found valid")
                }
                Err(error) => {
                    let byte = at - rest.len() as u64 + error.valid_up_to() as u64;
                    return Err(DataError::Text { path: self.path.clone(), problem: format!("not UTF-8 at byte {byte}: convert it first") });
                }
            };
            let cut = if at == self.range.end { text.len() } else { last_line_start(text) };
            each(&text[..cut])?;
            rest.drain(..cut);
        }
        Ok(())
    }
}

/// The last place where text can be cut like `line_start_after` does; its end if there is none.
fn last_line_start(text: &str) -> usize {
    let bytes = text.as_bytes();
    let found = (1..bytes.len().saturating_sub(1)).rev().find(|at| bytes[*at] == b'\n' && bytes[at + 1].is_ascii_graphic());
    found.unwrap_or(text.len())
}

fn total_bytes(parts: &[Part]) -> u64 {
    parts.iter().map(Part::len).sum()
}

/// Takes the end of the text away from `train`, from the start of a paragraph on.
fn hold_out_end(train: &mut Vec<Part>) -> Result<Vec<Part>, DataError> {
    let mut left = total_bytes(train) - total_bytes(train) / HELD_OUT_PART;
    let Some(index) = train.iter().position(|part| {
        let here = left < part.len();
        left -= if here { 0 } else { part.len() };
        here
    }) else {
        return Ok(Vec::new());
    };
    let part = &train[index];
    let start = part.range.start + left;
    let cut = start + paragraph_start(&part.read(start, PARAGRAPH_BYTES_MAX)?) as u64;
    let mut valid = train.split_off(index);
    if cut > valid[0].range.start {
        train.push(Part { path: valid[0].path.clone(), range: valid[0].range.start..cut });
    }
    valid[0].range.start = cut;
    valid.retain(|part| part.len() > 0);
    Ok(valid)
}

/// Where after the start of `bytes` a paragraph begins; else a line, else a character.
fn paragraph_start(bytes: &[u8]) -> usize {
    let after = |pattern: &[u8]| bytes.windows(pattern.len()).position(|window| window == pattern).map(|at| at + pattern.len()).filter(|at| *at < bytes.len());
    let character = || bytes.iter().position(|byte| byte & 0xC0 != 0x80).unwrap_or(0);
    after(b"\n\n").or_else(|| after(b"\n")).unwrap_or_else(character)
}

/// Text to train a tokenizer on: all, or pieces at even distances.
fn sample(parts: &[Part]) -> Result<Vec<String>, DataError> {
    let total = total_bytes(parts);
    let every = if total <= TRAINING_BYTES_MAX { 1 } else { total.div_ceil(TRAINING_BYTES_MAX) };
    let mut pieces = Vec::new();
    let mut index = 0_u64;
    for part in parts {
        for from in part.range.clone().step_by(TRAINING_PIECE_BYTES as usize) {
            if index.is_multiple_of(every) {
                let bytes = part.read(from, TRAINING_PIECE_BYTES)?;
                let text = String::from_utf8_lossy(&bytes);
                // Neither end is a line's: half words and characters are no examples.
                let start = if from == part.range.start { 0 } else { line_start_after(&text, 0).unwrap_or(0) };
                let end = if from + TRAINING_PIECE_BYTES >= part.range.end { text.len() } else { last_line_start(&text).max(start) };
                pieces.push(text[start..end].to_owned());
            }
            index += 1;
        }
    }
    Ok(pieces)
}

/// Turns text into shards.
struct Writer<'a> {
    out: &'a Path,
    tokenizer: &'a Tokenizer,
    token_bytes: u32,
    shard_tokens: u64,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(BuildProgress),
}

impl Writer<'_> {
    fn split(&mut self, parts: &[Part]) -> Result<Split, DataError> {
        let mut split = Split::default();
        let mut shard: Vec<u8> = Vec::new();
        let width = self.token_bytes as usize;
        let full = usize::try_from(self.shard_tokens).expect("limits bound a shard") * width;
        for part in parts {
            part.pieces(|text| {
                for token in self.tokenizer.encode(text)? {
                    shard.extend_from_slice(&token.to_le_bytes()[..width]);
                    if shard.len() == full {
                        split.shards.push(self.write(&mut shard)?);
                    }
                }
                split.text_bytes += text.len() as u64;
                self.done += text.len() as u64;
                (self.progress)(BuildProgress { doing: "tokenizing", done: self.done, total: self.total });
                Ok(())
            })?;
        }
        if !shard.is_empty() {
            split.shards.push(self.write(&mut shard)?);
        }
        Ok(split)
    }

    fn write(&self, shard: &mut Vec<u8>) -> Result<Shard, DataError> {
        let hash = Hash::of(shard);
        save_file(self.out, hash, shard)?;
        let tokens = (shard.len() / self.token_bytes as usize) as u64;
        shard.clear();
        Ok(Shard { hash, tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::store::Store;

    struct World {
        folder: tempfile::TempDir,
        options: BuildOptions,
    }

    fn world(tokenizer: TokenizerSpec, train: &[&str], valid: &[&str]) -> World {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |kind: &str, texts: &[&str]| -> Vec<PathBuf> {
            let paths = (0..texts.len()).map(|index| folder.path().join(format!("{kind}{index}.txt")));
            paths.zip(texts).inspect(|(path, text)| std::fs::write(path, text).expect("writable")).map(|(path, _)| path).collect()
        };
        let (train, valid) = (write("train", train), write("valid", valid));
        let options = BuildOptions { out: folder.path().join("data"), tokenizer, train, valid, shard_tokens: 1000 };
        World { folder, options }
    }

    fn prose(paragraphs: usize) -> String {
        (0..paragraphs).map(|i| format!("Paragraph {i} — of a text\nthat has {} words, or more.\n\n", i * i % 97)).collect()
    }

    /// Builds, and decodes what was built: (train, valid).
    fn built(world: &World) -> (DataManifest, String, String) {
        let manifest = build(&world.options, &mut |_| ()).expect("builds");
        let store = Store::open(&world.options.out, manifest.name()).expect("complete");
        let tokenizer = store.tokenizer().expect("our own");
        let text = |tokens: Vec<u32>| tokenizer.decode(&tokens).expect("decodes");
        let (train, valid) = (text(store.train().read_all().expect("intact")), text(store.valid().read_all().expect("intact")));
        assert_eq!((manifest.train.text_bytes, manifest.valid.text_bytes), (train.len() as u64, valid.len() as u64));
        (manifest, train, valid)
    }

    #[test]
    fn the_text_comes_back_from_the_shards() {
        let (first, second) = (prose(300), prose(40));
        for tokenizer in [TokenizerSpec::Bytes, TokenizerSpec::Bpe(400)] {
            let (manifest, train, valid) = built(&world(tokenizer, &[&first, "", &second], &[&second]));
            assert_eq!((train, valid), (format!("{first}{second}"), second.clone()));
            let shards = &manifest.train.shards;
            assert!(shards.len() > 2 && shards[..shards.len() - 1].iter().all(|shard| shard.tokens == 1000));
        }
    }

    #[test]
    fn without_held_out_files_the_end_is_held_out_from_a_paragraph_on() {
        let text = prose(300);
        let (_, train, valid) = built(&world(TokenizerSpec::Bytes, &[&text[..5000], &text[5000..]], &[]));
        assert_eq!(format!("{train}{valid}"), text);
        assert!(valid.starts_with("Paragraph") && train.ends_with("\n\n"));
        let share = valid.len() as f64 / text.len() as f64;
        assert!((0.04..=0.05).contains(&share), "{share}");
    }

    #[test]
    fn the_same_text_has_the_same_name_wherever_it_lies() {
        let text = prose(300);
        let name = |tokenizer| build(&world(tokenizer, &[&text], &[]).options, &mut |_| ()).expect("builds").name();
        assert_eq!(name(TokenizerSpec::Bpe(280)), name(TokenizerSpec::Bpe(280)));
        assert_ne!(name(TokenizerSpec::Bpe(280)), name(TokenizerSpec::Bpe(281)));
    }

    #[test]
    fn a_saved_tokenizer_is_used_as_it_is() {
        let text = prose(300);
        let mut world = world(TokenizerSpec::Bpe(300), &[&text], &[]);
        let (manifest, ..) = built(&world);
        let path = world.folder.path().join("tokenizer.json");
        let store = Store::open(&world.options.out, manifest.name()).expect("complete");
        std::fs::write(&path, store.read(manifest.tokenizer.hash).expect("intact")).expect("writable");
        world.options.tokenizer = TokenizerSpec::File(path);
        assert_eq!(built(&world).0, manifest);
    }

    #[test]
    fn what_is_no_text_is_named_and_leaves_no_manifest() {
        let world = world(TokenizerSpec::Bytes, &["fine"], &["fine"]);
        std::fs::write(&world.options.train[0], b"abc\xFFdef").expect("writable");
        let error = build(&world.options, &mut |_| ()).expect_err("not UTF-8");
        assert!(error.to_string().ends_with("train0.txt: not UTF-8 at byte 3: convert it first"), "{error}");
        assert!(matches!(Store::open_only(&world.options.out), Err(DataError::NoDataSet { .. })));
        let folder = BuildOptions { train: vec![world.folder.path().to_owned()], ..world.options.clone() };
        assert!(matches!(build(&folder, &mut |_| ()), Err(DataError::Text { .. })));
        let missing = BuildOptions { train: vec!["no such file".into()], ..world.options };
        assert!(matches!(build(&missing, &mut |_| ()), Err(DataError::Io { .. })));
    }

    #[test]
    fn long_text_is_read_in_pieces_and_a_character_across_them_survives() {
        // Lines of 7 bytes with characters of 3, so that the ends of pieces fall into them.
        let text = "世界\n".repeat(usize::try_from(READ_BYTES).expect("small") / 7 + 9_999);
        let (manifest, train, _) = built(&world(TokenizerSpec::Bytes, &[&text], &["x"]));
        assert!(train == text && manifest.train.tokens() == text.len() as u64);
    }

    #[test]
    fn progress_reaches_the_end() {
        let world = world(TokenizerSpec::Bytes, &["some text"], &["more"]);
        let mut last = None;
        build(&world.options, &mut |progress| last = Some(progress)).expect("builds");
        assert_eq!(last, Some(BuildProgress { doing: "tokenizing", done: 13, total: 13 }));
    }
}
