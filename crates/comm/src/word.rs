//! A parting word: the last thing that a rank says to the others of its group, namely why it leaves.
//!
//! A rank whose peer leaves with a word reports that word and hands it on as it is, so the first cause reaches every rank under
//! the name of the rank that was really hurt, and not as a row of ranks that lost each other. How a word travels is the
//! transport's affair; it is told to whoever can be told without waiting. A connection that ends without a word is a death:
//! whoever can still speak, does.

use crate::error::Error;
use phalanx_wire::Rank;

/// Why a rank left its group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Word {
    /// Who saw the cause first.
    pub(crate) by: Rank,
    pub(crate) why: Why,
    /// For people: at most [`MAX_TEXT`] bytes of it arrive.
    pub(crate) text: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// It had nothing more to do there: no failure of the group.
    Left,
    /// It ended the group itself.
    Ended,
    /// It lost this rank.
    Lost(Rank),
}

/// Bytes of a word that say who and why.
const FIXED: usize = 12;
/// The longest text in bytes.
pub(crate) const MAX_TEXT: usize = 1000;
/// The longest encoded word.
pub(crate) const MAX_WORD: usize = FIXED + MAX_TEXT;

impl Word {
    /// What `rank` says when its group fails, whose ranks are `members` to others.
    pub(crate) fn of(rank: Rank, error: &Error, members: &[Rank]) -> Word {
        match error {
            Error::PeerLost { peer, said_by, reason, .. } => {
                Word { by: said_by.unwrap_or(rank), why: Why::Lost(*peer), text: reason.clone() }
            }
            Error::Silent { peer, reason, .. } => {
                Word { by: rank, why: Why::Lost(*peer), text: reason.clone() }
            }
            Error::Aborted { by, reason } => Word { by: *by, why: Why::Ended, text: reason.clone() },
            other => {
                let text = other.clone().in_run(members).to_string();
                Word { by: rank, why: Why::Ended, text }
            }
        }
    }

    /// What `rank` says when it leaves a group that didn't fail.
    pub(crate) fn farewell(rank: Rank) -> Word {
        let text = if std::thread::panicking() { "its thread panicked" } else { "it left the group" };
        Word { by: rank, why: Why::Left, text: text.into() }
    }

    /// What losing `peer`, who left with this word, is to a rank that is in `operation`.
    pub(crate) fn into_error(self, operation: String, peer: Rank) -> Error {
        let Word { by, why, text } = self;
        match why {
            Why::Left => Error::PeerLost { operation, peer, said_by: None, reason: text },
            Why::Ended => Error::Aborted { by, reason: text },
            Why::Lost(lost) => Error::PeerLost { operation, peer: lost, said_by: Some(by), reason: text },
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let (why, lost) = match self.why {
            Why::Left => (0u32, 0),
            Why::Ended => (1, 0),
            Why::Lost(lost) => (2, lost.0),
        };
        let longest = self.text.len().min(MAX_TEXT);
        let end = (0..=longest).rev().find(|&at| self.text.is_char_boundary(at)).unwrap_or(0);
        let mut bytes = Vec::with_capacity(FIXED + end);
        [self.by.0, why, lost].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend_from_slice(&self.text.as_bytes()[..end]);
        bytes
    }

    /// None if it isn't a word.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Word> {
        let (fixed, text) = bytes.split_at_checked(FIXED).filter(|_| bytes.len() <= MAX_WORD)?;
        let word = |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
        let why = match word(4) {
            0 => Why::Left,
            1 => Why::Ended,
            2 => Why::Lost(Rank(word(8))),
            _ => return None,
        };
        Some(Word { by: Rank(word(0)), why, text: String::from_utf8_lossy(text).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_arrives_as_it_was_said() {
        for why in [Why::Left, Why::Ended, Why::Lost(Rank(7))] {
            for text in ["", "its process is gone", "h\u{e9}las"] {
                let word = Word { by: Rank(3), why, text: text.into() };
                assert_eq!(Word::decode(&word.encode()), Some(word));
            }
        }
    }

    #[test]
    fn a_long_text_is_cut_between_two_characters() {
        let word = Word { by: Rank(0), why: Why::Ended, text: "\u{20ac}".repeat(MAX_TEXT) };
        let bytes = word.encode();
        assert!(bytes.len() <= MAX_WORD);
        assert!(Word::decode(&bytes).unwrap().text.chars().all(|c| c == '\u{20ac}'));
    }

    #[test]
    fn what_is_no_word_is_refused() {
        let whole = Word { by: Rank(0), why: Why::Ended, text: String::new() }.encode();
        (0..whole.len()).for_each(|len| assert_eq!(Word::decode(&whole[..len]), None, "{len} bytes"));
        assert_eq!(Word::decode(&[9; FIXED]), None);
        assert_eq!(Word::decode(&[0; MAX_WORD + 1]), None);
    }

    #[test]
    fn the_first_cause_is_handed_on_as_it_is() {
        let lost = |operation: &str, said_by| Error::PeerLost {
            operation: operation.into(),
            peer: Rank(2),
            said_by,
            reason: "its process is gone".into(),
        };
        let first = Word::of(Rank(1), &lost("barrier #1", None), &[]);
        let second = Word::of(Rank(3), &first.clone().into_error("barrier #1".into(), Rank(1)), &[]);
        assert_eq!(first, second);
        let told = second.into_error("barrier #1".into(), Rank(3)).to_string();
        assert_eq!(told, "barrier #1: rank 2 is gone, says rank 1: its process is gone");
    }
}
