//! Text to tokens and back: bytes, byte-level BPE trained here, or a `tokenizer.json` of anyone's.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use skein_protocol::limits::{TOKENIZER_BYTES_MAX, VOCAB_MAX};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use super::{DataError, write_atomic};

/// Text is cut into pieces of about so many bytes, which are encoded side by side.
const PIECE_BYTES: usize = 64 * 1024;

/// Which tokenizer to use, as the user says it: `bytes`, `bpe:1024`, or a file's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// One token a byte; the token is the byte's value.
    Bytes,
    /// Byte-level BPE of so many tokens, the 256 bytes among them, trained on the text.
    Bpe(u32),
    /// A `tokenizer.json`.
    File(PathBuf),
}

impl FromStr for TokenizerSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            _ if text == "bytes" => Ok(Self::Bytes),
            Some(("bpe", count)) => match count.parse() {
                Ok(count) if (257..=VOCAB_MAX).contains(&count) => Ok(Self::Bpe(count)),
                _ => Err(format!("`{text}`: bpe needs a number of tokens from 257 to {VOCAB_MAX}, such as bpe:1024")),
            },
            _ if text == "bpe" => Err("`bpe`: say how many tokens, such as bpe:1024".to_owned()),
            _ => Ok(Self::File(text.into())),
        }
    }
}

impl fmt::Display for TokenizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("bytes"),
            Self::Bpe(count) => write!(f, "bpe:{count}"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// A tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: u32,
    /// Tokens are the bytes' values: no library is needed.
    is_bytes: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab_size)
    }
}

impl Tokenizer {
    /// One token a byte.
    pub fn bytes() -> Self {
        let characters = byte_characters();
        let vocab: [(String, u32); 256] = std::array::from_fn(|byte| (characters[byte].to_string(), byte as u32));
        let model = BPE::builder().vocab_and_merges(vocab, Vec::new()).build();
        Self::byte_level(model.expect("256 distinct characters are a vocabulary"), true)
    }

    /// Trains byte-level BPE of at most `vocab_size` tokens on pieces of text. The same pieces
    /// give the same tokenizer.
    pub fn train_bpe(vocab_size: u32, pieces: &[String]) -> Result<Self, DataError> {
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(vocab_size as usize)
            .min_frequency(2)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut trained = TokenizerImpl::<BPE, NormalizerWrapper, ByteLevel, PostProcessorWrapper, DecoderWrapper>::new(BPE::default());
        trained.with_pre_tokenizer(Some(ByteLevel::new(false, false, true)));
        trained.train(&mut trainer, pieces.iter()).map_err(|error| DataError::Tokenizer(error.to_string()))?;
        Ok(Self::byte_level(trained.get_model().clone(), false))
    }

    fn byte_level(model: BPE, is_bytes: bool) -> Self {
        let byte_level = ByteLevel::new(false, false, true);
        let mut inner = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
        inner.with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(byte_level)));
        inner.with_decoder(Some(DecoderWrapper::ByteLevel(byte_level)));
        let vocab_size = u32::try_from(inner.get_vocab_size(true)).expect("fewer tokens than asked for, which is a u32");
        Self { inner, vocab_size, is_bytes }
    }

    /// Reads a tokenizer from the bytes of a `tokenizer.json` of any origin.
    pub fn from_json(json: &[u8]) -> Result<Self, DataError> {
        if json.len() as u64 > TOKENIZER_BYTES_MAX {
            return Err(DataError::Tokenizer(format!("tokenizer.json has {} bytes, at most {TOKENIZER_BYTES_MAX} are allowed", json.len())));
        }
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| DataError::Tokenizer(format!("not a tokenizer.json: {error}")))?;
        // What pads or cuts would lose text or add tokens that nobody wrote.
        inner.with_truncation(None).expect("no truncation has no parameters that could be wrong");
        inner.with_padding(None);
        let vocab = inner.get_vocab(true);
        let vocab_size = vocab.values().max().map_or(0, |highest| highest.saturating_add(1));
        if !(1..=VOCAB_MAX).contains(&vocab_size) {
            return Err(DataError::Tokenizer(format!("a vocabulary of {vocab_size} tokens, 1 to {VOCAB_MAX} are allowed")));
        }
        let is_bytes = vocab.len() == 256 && byte_characters().iter().zip(0_u32..).all(|(character, byte)| vocab.get(&character.to_string()) == Some(&byte));
        Ok(Self { inner, vocab_size, is_bytes })
    }

    /// Reads a `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let json = std::fs::read(path).map_err(DataError::io(path))?;
        Self::from_json(&json).map_err(|error| DataError::Text { path: path.to_owned(), problem: error.to_string() })
    }

    /// The content of its `tokenizer.json`: equal tokenizers, equal bytes.
    pub fn to_json(&self) -> Vec<u8> {
        let text = self.inner.to_string(false).expect("a tokenizer has a JSON form");
        // Through an ordered map: the library's maps are not all ordered.
        let value: serde_json::Value = serde_json::from_str(&text).expect("the library writes JSON");
        serde_json::to_vec(&value).expect("a JSON value has a JSON form")
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into a folder of an exported model, as
    /// Hugging Face `transformers` reads them. `length_max`: the longest sequence of the model.
    pub fn save_pretrained(&self, folder: &Path, length_max: usize) -> Result<(), DataError> {
        let config = BTreeMap::from([
            ("tokenizer_class", serde_json::json!("PreTrainedTokenizerFast")),
            ("model_max_length", serde_json::json!(length_max)),
            ("clean_up_tokenization_spaces", serde_json::json!(false)),
        ]);
        let config = serde_json::to_vec_pretty(&config).expect("strings and numbers have a JSON form");
        write_atomic(&folder.join("tokenizer.json"), &self.to_json())?;
        write_atomic(&folder.join("tokenizer_config.json"), &config)
    }

    /// Every token is below this.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The tokens of a text, without special ones.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        if self.is_bytes {
            return Ok(text.bytes().map(u32::from).collect());
        }
        let encodings = self.inner.encode_batch_fast(pieces(text), false).map_err(|error| DataError::Tokenizer(error.to_string()))?;
        Ok(encodings.iter().flat_map(|encoding| encoding.get_ids().iter().copied()).collect())
    }

    /// The text of tokens; what is no UTF-8 becomes the replacement character, tokens that the
    /// vocabulary does not have are left out.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        if self.is_bytes {
            let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        self.inner.decode(tokens, false).map_err(|error| DataError::Tokenizer(error.to_string()))
    }
}

/// Cuts text before line breaks that start no blank line: there the byte-level pattern cuts too,
/// so that pieces give the tokens of the whole.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > PIECE_BYTES {
        let Some(cut) = line_start_after(rest, PIECE_BYTES) else { break };
        let (piece, after) = rest.split_at(cut);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// Where after `from` a line break is followed by something other than white space.
pub(crate) fn line_start_after(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (from..bytes.len().saturating_sub(1)).find(|at| bytes[*at] == b'\n' && bytes[at + 1].is_ascii_graphic())
}

/// The character that stands for each byte in byte-level vocabularies: printable bytes of Latin-1
/// stand for themselves, the others for what follows from U+0100 on.
fn byte_characters() -> [char; 256] {
    let mut others = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match u8::try_from(byte).expect("an index below 256") {
        byte @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(byte),
        _ => others.next().expect("there are many characters"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "The quick brown fox\n  jumps over the lazy dog.\n\nGrüße, 世界! 🦢\t0123 don't\r\n";

    fn trained() -> Tokenizer {
        let pieces: Vec<String> = (0..50).map(|i| format!("the lazy dog {} jumps over the quick brown fox number {i}\n", i % 7)).collect();
        Tokenizer::train_bpe(300, &pieces).expect("trains")
    }

    #[test]
    fn a_byte_is_a_token_and_the_library_agrees() {
        let tokenizer = Tokenizer::bytes();
        assert_eq!(tokenizer.vocab_size(), 256);
        let tokens = tokenizer.encode(TEXT).expect("encodes");
        assert_eq!(tokens, TEXT.bytes().map(u32::from).collect::<Vec<_>>());
        let library = tokenizer.inner.encode_fast(TEXT, false).expect("encodes");
        assert_eq!(library.get_ids(), tokens, "who loads our file elsewhere gets the same tokens");
        assert_eq!(tokenizer.decode(&tokens).expect("decodes"), TEXT);
        assert!(Tokenizer::from_json(&tokenizer.to_json()).expect("our own").is_bytes);
    }

    #[test]
    fn any_text_survives_a_trained_tokenizer_and_its_file() {
        let tokenizer = trained();
        assert!((257..=300).contains(&tokenizer.vocab_size()));
        let again = Tokenizer::from_json(&tokenizer.to_json()).expect("our own");
        for text in [TEXT, "", "\n\n\n", "unseen Ωords", " lead and trail "] {
            let tokens = tokenizer.encode(text).expect("encodes");
            assert_eq!(tokenizer.decode(&tokens).expect("decodes"), text);
            assert_eq!(again.encode(text).expect("encodes"), tokens);
            assert!(tokens.iter().all(|token| *token < tokenizer.vocab_size()));
        }
        assert!(tokenizer.encode("the lazy dog").expect("encodes").len() < 6, "it has learned something");
        assert!(!again.is_bytes);
    }

    #[test]
    fn training_is_deterministic() {
        assert_eq!(trained().to_json(), trained().to_json());
    }

    #[test]
    fn pieces_give_the_tokens_of_the_whole() {
        let text: String = (0..6_000).map(|i| format!("line {i}: the quick\n{}", ["", "\n", "  \n  ", "\t"][i % 4])).collect();
        assert!(pieces(&text).len() > 1 && pieces(&text).concat() == text);
        let tokenizer = trained();
        let whole = tokenizer.inner.encode_fast(text.as_str(), false).expect("encodes");
        assert_eq!(tokenizer.encode(&text).expect("encodes"), whole.get_ids());
        assert_eq!(pieces(&"x".repeat(3 * PIECE_BYTES)).len(), 1, "a text of one line stays whole");
    }

    #[test]
    fn specifications_are_read_and_mistakes_explained() {
        assert_eq!("bytes".parse(), Ok(TokenizerSpec::Bytes));
        assert_eq!("bpe:1024".parse(), Ok(TokenizerSpec::Bpe(1024)));
        assert_eq!("some/tokenizer.json".parse(), Ok(TokenizerSpec::File("some/tokenizer.json".into())));
        let error = "bpe:256".parse::<TokenizerSpec>().expect_err("too few");
        assert_eq!(error, "`bpe:256`: bpe needs a number of tokens from 257 to 4194304, such as bpe:1024");
        assert!("bpe".parse::<TokenizerSpec>().is_err());
    }

    #[test]
    fn a_bad_file_is_an_error_and_the_exported_one_has_its_configuration() {
        assert!(matches!(Tokenizer::from_json(b"{\"model\": 3}"), Err(DataError::Tokenizer(_))));
        let folder = tempfile::tempdir().expect("temporary folder");
        trained().save_pretrained(folder.path(), 128).expect("writable");
        let config = std::fs::read_to_string(folder.path().join("tokenizer_config.json")).expect("written");
        assert!(config.contains("\"PreTrainedTokenizerFast\"") && config.contains("128"), "{config}");
        assert_eq!(Tokenizer::load(&folder.path().join("tokenizer.json")).expect("written").to_json(), trained().to_json());
    }
}
