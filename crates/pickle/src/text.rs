//! The textual arguments of protocol 0. Each function yields `None` for what Python wouldn't have written.

use std::borrow::Cow;

/// A Python 2 string as its `repr`: in quotes, with escapes.
pub(crate) fn quoted(line: &[u8]) -> Option<Cow<'_, [u8]>> {
    let (&quote, rest) = line.split_first()?;
    let (&last, inner) = rest.split_last()?;
    if !matches!(quote, b'\'' | b'"') || last != quote {
        return None;
    }
    if !inner.contains(&b'\\') {
        return Some(Cow::Borrowed(inner));
    }
    let mut out = Vec::with_capacity(inner.len());
    let mut rest = inner;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&escape, after) = rest.split_first()?;
        rest = after;
        out.push(match escape {
            b'\\' | b'\'' | b'"' => escape,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'x' => {
                let (digits, after) = rest.split_at_checked(2)?;
                rest = after;
                u8::try_from(hex(digits)?).ok()?
            }
            _ => return None,
        });
    }
    Some(Cow::Owned(out))
}

/// Text in Python's `raw-unicode-escape`: `\uXXXX` and `\UXXXXXXXX` are escapes, every other byte is a Latin-1 letter.
pub(crate) fn raw_unicode(line: &[u8]) -> Option<Cow<'_, str>> {
    if line.is_ascii() && !line.contains(&b'\\') {
        return std::str::from_utf8(line).ok().map(Cow::Borrowed);
    }
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let n_digits = match (byte, rest.first()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => {
                out.push(char::from(byte));
                continue;
            }
        };
        let (digits, after) = rest[1..].split_at_checked(n_digits)?;
        rest = after;
        out.push(char::from_u32(hex(digits)?)?);
    }
    Some(Cow::Owned(out))
}

fn hex(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |number, &digit| Some(number * 16 + char::from(digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_strings_lose_quotes_and_escapes() {
        let check = |line: &[u8], want: Option<&[u8]>| {
            assert_eq!(quoted(line).as_deref(), want, "{}", line.escape_ascii());
        };
        check(b"'plain'", Some(b"plain"));
        check(b"\"it's\"", Some(b"it's"));
        check(br"'a\n\r\t\\\'\xff'", Some(b"a\n\r\t\\'\xff"));
        check(b"''", Some(b""));
        for broken in [&b""[..], b"'", b"'a", b"a'", b"'a\"", br"'\'", br"'\x1'", br"'\xg1'", br"'\q'"] {
            check(broken, None);
        }
    }

    #[test]
    fn raw_unicode_is_latin_1_with_escapes() {
        let check = |line: &[u8], want: Option<&str>| {
            assert_eq!(raw_unicode(line).as_deref(), want, "{}", line.escape_ascii());
        };
        check(b"plain", Some("plain"));
        check(br"\u00e9\u005cn \U0001f600 \n", Some("\u{e9}\\n \u{1f600} \\n"));
        check(b"\xe9", Some("\u{e9}"));
        for broken in [&br"\u00e"[..], br"\ud800", br"\U00110000", br"\U0000", br"\u00g9"] {
            check(broken, None);
        }
    }
}
