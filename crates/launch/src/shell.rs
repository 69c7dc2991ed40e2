//! Words for shells, and words as shells read them.

/// A word as a shell reads it back.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A word that [`quoted`] has made fit for a shell.
pub fn unquoted(text: &str) -> String {
    let inner = text.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
    inner.map_or(text.to_owned(), |inner| inner.replace(r"'\''", "'"))
}

/// The words of a command line, with blanks between them and quotes around those that have some; nothing else of a shell's means
/// anything. Fails where a quote isn't closed, with that quote.
pub fn words(line: &str) -> Result<Vec<String>, char> {
    let mut all = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c.is_whitespace() => all.extend(word.take()),
            None if c == '\'' || c == '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None => word.get_or_insert_default().push(c),
        }
    }
    all.extend(word);
    quote.map_or(Ok(all), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn words_survive_a_shell() {
        for word in ["plain", "", "a b", "it's", "$HOME", "a\"b", "*", "x=1", "line\nbreak", "\\"] {
            let echo =
                Command::new("sh").args(["-c", &format!("printf %s {}", quoted(word))]).output().unwrap();
            assert_eq!(String::from_utf8(echo.stdout).unwrap(), word);
            assert_eq!(unquoted(&quoted(word)), word);
        }
    }

    #[test]
    fn a_line_is_cut_at_its_blanks() {
        let check = |line: &str, want: Result<&[&str], char>| {
            let got = words(line);
            let got = got.as_ref().map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(got.as_deref().map_err(|quote| **quote), want, "{line}");
        };
        check("ssh -p 2222", Ok(&["ssh", "-p", "2222"]));
        check("  ssh\t-i 'my key'  ", Ok(&["ssh", "-i", "my key"]));
        check(r#"ssh -o "ProxyCommand=nc 'a'""#, Ok(&["ssh", "-o", "ProxyCommand=nc 'a'"]));
        check("a'b c'd ''", Ok(&["ab cd", ""]));
        check("", Ok(&[]));
        check("ssh 'open", Err('\''));
        check("ssh \"open", Err('"'));
    }
}
