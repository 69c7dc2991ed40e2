//! What a shell's quotes and here-documents make of a line, as far as the rules need it.

/// Commands whose arguments are only shown, or nothing at all.
const SHOWN: [&str; 3] = ["echo", "printf", ":"];
/// What may stand before a command.
const KEYWORDS: [&str; 10] = ["if", "then", "elif", "else", "while", "until", "do", "!", "{", "time"];

/// A text for a command in the lines behind it, as in `cat <<EOF`.
pub(super) struct Document {
    end: String,
    /// Whether tabs may stand before its end (`<<-`).
    is_indented: bool,
}

impl Document {
    /// Those that begin behind this line, in their order.
    pub(super) fn begun(line: &str) -> Vec<Document> {
        let mut begun = Vec::new();
        let mut passed = 0;
        for (at, _) in unquoted(line).filter(|(_, c)| *c == '<') {
            // `<<<` is followed by a string, and in arithmetic it is a shift.
            if at < passed || !line[at..].starts_with("<<") || line[..at].contains("((") {
                continue;
            }
            let rest = line[at..].trim_start_matches('<');
            passed = line.len() - rest.len();
            if passed - at != 2 {
                continue;
            }
            let (rest, is_indented) = rest.strip_prefix('-').map_or((rest, false), |rest| (rest, true));
            let word = rest.trim_start().split(|c: char| c.is_whitespace() || ";|&<>()".contains(c));
            let end = word.take(1).collect::<String>().replace(['\'', '"', '\\'], "");
            if !end.is_empty() {
                begun.push(Document { end, is_indented });
            }
        }
        begun
    }

    pub(super) fn ends_at(&self, line: &str) -> bool {
        let line = line.trim_end_matches('\r');
        self.end == if self.is_indented { line.trim_start_matches('\t') } else { line }
    }
}

/// What a line runs, one by one: its parts between `;`, `|` and `&` that are in no quotes.
pub(super) fn commands(line: &str) -> impl Iterator<Item = &str> {
    joined(line).into_iter().map(|(_, command)| command)
}

/// The same, each with what joins it to the one before, as `&&`; nothing before the first.
pub(super) fn joined(line: &str) -> Vec<(&str, &str)> {
    let (mut parts, mut joint, mut from) = (Vec::new(), 0..0, 0);
    for (at, c) in unquoted(line).filter(|(_, c)| ";|&".contains(*c)) {
        // As in `2>&1` and `&>log`.
        let is_redirection =
            c == '&' && (line[..at].ends_with(['>', '<']) || line[at + 1..].starts_with('>'));
        if is_redirection {
            continue;
        }
        match joint.end == at && !joint.is_empty() {
            true => joint.end = at + 1,
            false => {
                parts.push((&line[joint.clone()], &line[from..at]));
                joint = at..at + 1;
            }
        }
        from = at + 1;
    }
    parts.push((&line[joint], &line[from..]));
    parts
}

/// The program of a command, or its function.
pub(super) fn program(words: &[String]) -> Option<&str> {
    words.iter().map(String::as_str).find(|word| !KEYWORDS.contains(word))
}

/// Whether what a command is given is no command.
pub(super) fn is_text(words: &[String]) -> bool {
    program(words).is_some_and(|program| SHOWN.contains(&program))
}

/// The function whose definition begins in this line.
pub(super) fn defined(line: &str) -> Option<&str> {
    let (rest, is_said) =
        line.strip_prefix("function ").map_or((line, false), |rest| (rest.trim_start(), true));
    let end = rest.find(|c: char| c.is_whitespace() || "({".contains(c)).unwrap_or(rest.len());
    let (name, rest) = rest.split_at(end);
    let has_parentheses =
        rest.trim_start().strip_prefix('(').is_some_and(|rest| rest.trim_start().starts_with(')'));
    (!name.is_empty() && (is_said || has_parentheses)).then_some(name)
}

/// A line up to its comment: a `#` at its beginning or after a space, outside of quotes.
pub(super) fn without_comment(line: &str) -> &str {
    let is_comment = |at: usize| line[..at].chars().next_back().is_none_or(char::is_whitespace);
    let comment = unquoted(line).find(|&(at, c)| c == '#' && is_comment(at));
    comment.map_or(line, |(at, _)| line[..at].trim_end())
}

/// The characters that are in no quotes and behind no backslash, each with its place.
fn unquoted(line: &str) -> impl Iterator<Item = (usize, char)> {
    let mut state = Quotes::default();
    line.char_indices().filter(move |&(_, c)| state.pass(c))
}

/// The quotes that a line is in at its end, which begins in these.
pub(super) fn quotes_after(line: &str, open: Option<char>) -> Option<char> {
    let mut state = Quotes { open, is_escaped: false };
    for c in line.chars() {
        state.pass(c);
    }
    state.open
}

/// What the characters of a text are in.
#[derive(Default)]
struct Quotes {
    open: Option<char>,
    is_escaped: bool,
}

impl Quotes {
    /// Goes on by a character; whether that is in no quotes, and behind no backslash.
    fn pass(&mut self, c: char) -> bool {
        if std::mem::take(&mut self.is_escaped) {
            return false;
        }
        let was = self.open;
        match c {
            '\\' if was != Some('\'') => self.is_escaped = true,
            '\'' | '"' if was.is_none() => self.open = Some(c),
            _ if was == Some(c) => self.open = None,
            _ => {}
        }
        was.is_none() && self.open.is_none()
    }
}
