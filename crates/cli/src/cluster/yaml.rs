//! A YAML document as a tree whose nodes know their lines. Aliases are refused: they let a small file stand for a huge one, and
//! no configuration needs them.

use saphyr_parser::{Event, Parser};

/// How deep it may be.
const DEEPEST: usize = 64;

/// A node, with the line that it begins in, from 1.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) value: Value,
}

/// What a node is.
#[derive(Debug)]
pub(super) enum Value {
    /// A number, a word or a truth, as it is written; nothing is empty.
    Scalar(String),
    List(Vec<Node>),
    /// Keys in the order of the file, each with its line.
    Map(Vec<(String, usize, Node)>),
}

impl Node {
    /// The value of a key; none also where this is no map.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        let Value::Map(pairs) = &self.value else { return None };
        pairs.iter().find(|(found, ..)| found == key).map(|(_, _, node)| node)
    }

    pub(super) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) => Some(text),
            _ => None,
        }
    }

    /// Its elements; none where this is no list.
    pub(super) fn elements(&self) -> &[Node] {
        match &self.value {
            Value::List(list) => list,
            _ => &[],
        }
    }
}

/// What is open while it is read.
enum Open {
    List(usize, Vec<Node>),
    /// With the key that waits for its value.
    Map(usize, Vec<(String, usize, Node)>, Option<(String, usize)>),
}

/// The first document of a text; an error is its line and why.
pub(super) fn parse(text: &str) -> Result<Option<Node>, (usize, String)> {
    let (mut open, mut root) = (Vec::<Open>::new(), None);
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| (error.marker().line(), error.info().to_owned()))?;
        let line = span.start.line();
        let node = match event {
            Event::Alias(_) => return Err((line, "an alias: write the value itself".into())),
            Event::Scalar(text, ..) => Node { line, value: Value::Scalar(text.into_owned()) },
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() >= DEEPEST => {
                return Err((line, format!("more than {DEEPEST} levels")));
            }
            Event::SequenceStart(..) => {
                open.push(Open::List(line, Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Map(line, Vec::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::List(line, list)) => Node { line, value: Value::List(list) },
                Some(Open::Map(line, pairs, _)) => Node { line, value: Value::Map(pairs) },
                None => continue,
            },
            Event::DocumentEnd => return Ok(root),
            _ => continue,
        };
        match open.last_mut() {
            None => root = Some(node),
            Some(Open::List(_, list)) => list.push(node),
            Some(Open::Map(_, pairs, key)) => match (key.take(), node.value) {
                (Some((name, at)), value) => pairs.push((name, at, Node { line, value })),
                (None, Value::Scalar(name)) if pairs.iter().any(|(known, ..)| *known == name) => {
                    return Err((line, format!("the key {name} is there twice")));
                }
                (None, Value::Scalar(name)) => *key = Some((name, line)),
                (None, _) => return Err((line, "a key has to be a word".into())),
            },
        }
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_know_their_lines() {
        let root = parse("a:\n  b: [1, 'x y']\n  c:\nd: {e: f}\n").unwrap().unwrap();
        let b = root.get("a").unwrap().get("b").unwrap();
        assert_eq!((b.line, b.elements()[1].text()), (2, Some("x y")));
        assert_eq!(root.get("d").unwrap().get("e").unwrap().text(), Some("f"));
        assert!(root.get("x").is_none() && parse("").unwrap().is_none());
    }

    #[test]
    fn what_makes_no_sense_is_told_by_its_line() {
        assert_eq!(parse("a: 1\nb: 2\na: 3\n").unwrap_err(), (3, "the key a is there twice".into()));
        assert_eq!(parse("a: &x [1]\nb: *x\n").unwrap_err().0, 2);
        assert!(parse("a: [1,\nb: 2\n").is_err());
        assert!(parse(&"[".repeat(100_000)).is_err());
    }
}
