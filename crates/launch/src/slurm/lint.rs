//! The classic mistakes in batch scripts for distributed training, each with the line that has it, why it is one, and the line to
//! write in its place.
//!
//! A script is read line by line, as people write them; it is not run, and what a shell would make of it is guessed no further than
//! its words. A rule speaks up where the line is wrong as it stands, and is silent where it can't know.

mod directives;
mod rules;
mod text;

use directives::{Directives, is_directive};
use text::{Document, commands, defined, is_text, quotes_after, without_comment};

/// A mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its line in the file, from 1.
    pub line: usize,
    /// A name for the rule.
    pub rule: &'static str,
    /// Why it is one.
    pub why: String,
    /// What to write there instead.
    pub instead: String,
}

/// A command of the script: a line, with those that it goes on in.
struct Line<'a> {
    number: usize,
    /// Without comments; continued lines are joined by spaces.
    text: String,
    /// Those of its commands; of what only shows text (`echo`) the first alone.
    words: Vec<String>,
    raw: &'a str,
}

impl Line<'_> {
    /// Whether one of its words is this one, or a path to it.
    fn runs(&self, program: &str) -> bool {
        self.words.iter().any(|word| word.rsplit('/').next() == Some(program))
    }

    /// Takes one more line that begins in its quotes: mostly a script, whose commands a semicolon would part as well.
    fn go_on_in_quotes(&mut self, line: &str) {
        let quotes = ['\'', '"'];
        if line.is_empty() || (line.starts_with('#') && !line.contains(quotes)) {
            return;
        }
        let is_at_quotes = self.text.ends_with(quotes) || line.starts_with(quotes);
        self.text.push_str(if is_at_quotes { "" } else { "; " });
        self.text.push_str(line);
    }

    /// What it runs, one by one.
    fn commands(&self) -> impl Iterator<Item = Line<'_>> {
        let command = |text: &str| Line { text: text.into(), words: words(text), ..*self };
        commands(&self.text).map(command)
    }

    /// The value of a flag, as in `--nodes=2`, `--nodes 2` or `-N2`; names may be written with dashes or underscores.
    fn flag(&self, names: &[&str]) -> Option<String> {
        flag(&self.words, names)
    }
}

/// The words of a command.
fn words(command: &str) -> Vec<String> {
    let bare = |word: &str| word.trim_matches(|c| "\"'();".contains(c)).to_owned();
    let words: Vec<_> = command.split_whitespace().map(bare).collect();
    // What is run for its output is still a command.
    match is_text(&words) && !["$(", "`"].iter().any(|begin| command.contains(begin)) {
        true => words.into_iter().take(1).collect(),
        false => words,
    }
}

/// The value of a flag among words; empty for one without.
fn flag(words: &[String], names: &[&str]) -> Option<String> {
    words.iter().enumerate().find_map(|(i, word)| {
        names.iter().find_map(|name| {
            let next = || words.get(i + 1).filter(|next| !next.starts_with('-')).cloned().unwrap_or_default();
            if !name.starts_with("--") {
                let rest = word.strip_prefix(name)?;
                return Some(if rest.is_empty() { next() } else { rest.trim_start_matches('=').to_owned() });
            }
            let (key, value) =
                word.split_once('=').map_or((word.as_str(), None), |(key, value)| (key, Some(value)));
            (key.replace('_', "-") == *name).then(|| value.map_or_else(next, str::to_owned))
        })
    })
}

/// The script as the rules see it.
struct Script<'a> {
    directives: Directives,
    lines: Vec<Line<'a>>,
    /// Every line of the file as it is, from 1 on.
    raw: Vec<(usize, &'a str)>,
    /// Which of these are text for a command (here-documents), and no part of the script.
    documents: Vec<usize>,
    /// The functions that it defines.
    functions: Vec<String>,
    folder_exists: &'a dyn Fn(&str) -> bool,
}

/// All mistakes of a script, by line. `folder_exists` is asked for folders that output is to be written to.
pub fn lint(text: &str, folder_exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let script = parse(text, folder_exists);
    let mut found: Vec<Finding> = rules::RULES
        .iter()
        .flat_map(|(name, rule)| {
            rule(&script).into_iter().map(|(line, why, instead)| Finding { line, rule: name, why, instead })
        })
        .collect();
    found.sort_by(|a, b| a.line.cmp(&b.line).then(a.rule.cmp(b.rule)));
    found
}

fn parse<'a>(text: &'a str, folder_exists: &'a dyn Fn(&str) -> bool) -> Script<'a> {
    let raw: Vec<(usize, &str)> =
        text.split_terminator('\n').enumerate().map(|(i, line)| (i + 1, line)).collect();
    let (mut lines, mut directives) = (Vec::<Line<'_>>::new(), Directives::default());
    let (mut goes_on, mut awaited, mut documents) = (false, Vec::<Document>::new(), Vec::new());
    let mut quotes = None;
    for (at, &(number, line)) in raw.iter().enumerate() {
        if let Some(document) = awaited.first().filter(|_| !goes_on) {
            documents.push(number);
            if document.ends_at(line) {
                awaited.remove(0);
            }
            continue;
        }
        let trimmed = line.trim();
        if is_directive(trimmed) {
            directives.add(number, trimmed, !lines.is_empty());
            continue;
        }
        let bare = if quotes.is_none() { without_comment(trimmed) } else { trimmed };
        // What never ends was none.
        let is_ended = |document: &Document| raw[at + 1..].iter().any(|(_, line)| document.ends_at(line));
        awaited.extend(Document::begun(bare).into_iter().filter(is_ended));
        let (part, continues) = bare.strip_suffix('\\').map_or((bare, false), |part| (part, true));
        match lines.last_mut().filter(|_| goes_on || quotes.is_some()) {
            Some(last) if !goes_on => last.go_on_in_quotes(part.trim()),
            Some(last) => last.text = format!("{} {}", last.text, part.trim()),
            None if part.trim().is_empty() => {}
            None => lines.push(Line { number, text: part.trim().to_owned(), words: Vec::new(), raw: line }),
        }
        goes_on = continues;
        // Nor were these.
        let mut rest = raw[at + 1..].iter();
        quotes = quotes_after(bare, quotes)
            .filter(|&open| rest.try_fold(open, |open, (_, line)| quotes_after(line, Some(open))).is_none());
    }
    for line in &mut lines {
        line.words = commands(&line.text).flat_map(words).collect();
    }
    let functions = lines.iter().filter_map(|line| defined(&line.text)).map(str::to_owned).collect();
    Script { directives, lines, raw, documents, functions, folder_exists }
}

#[cfg(test)]
mod tests;
