//! What stands before a worker's line: a template in torchrun's words.

use std::str::FromStr;

/// A template such as `[${role_name}${local_rank}]:`, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    RoleName,
    LocalRank,
    Rank,
    Hostname,
}

/// What a template's words stand for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named<'a> {
    pub(crate) role_name: &'a str,
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    pub(crate) hostname: &'a str,
}

impl Default for Prefix {
    /// `[rank${rank}]: `
    fn default() -> Prefix {
        Prefix(vec![Part::Text("[rank".into()), Part::Rank, Part::Text("]: ".into())])
    }
}

impl Prefix {
    pub(crate) fn of(&self, named: Named<'_>) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::RoleName => named.role_name.to_owned(),
            Part::LocalRank => named.local_rank.to_string(),
            Part::Rank => named.rank.to_string(),
            Part::Hostname => named.hostname.to_owned(),
        };
        self.0.iter().map(text).collect()
    }
}

/// As Python's `string.Template`: `$name` or `${name}`, and `$$` for a dollar.
impl FromStr for Prefix {
    type Err = String;

    fn from_str(template: &str) -> Result<Prefix, String> {
        let mut parts = Vec::new();
        let mut rest = template;
        while let Some((text, after)) = rest.split_once('$') {
            parts.push(Part::Text(text.to_owned()));
            if let Some(after) = after.strip_prefix('$') {
                parts.push(Part::Text("$".into()));
                rest = after;
                continue;
            }
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let (name, after) = match after.strip_prefix('{') {
                Some(inner) => inner.split_once('}').ok_or_else(|| format!("${{{inner} has no end"))?,
                None => after.split_at(after.find(|c| !is_of_name(c)).unwrap_or(after.len())),
            };
            parts.push(match name {
                "role_name" => Part::RoleName,
                "local_rank" => Part::LocalRank,
                "rank" => Part::Rank,
                "hostname" => Part::Hostname,
                _ => {
                    return Err(format!(
                        "${{{name}}} is none of ${{role_name}}, ${{local_rank}}, ${{rank}} and ${{hostname}}; a dollar is $$"
                    ));
                }
            });
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Prefix(parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_mean_what_they_do_in_torchrun() {
        let named = Named { role_name: "trainer", local_rank: 1, rank: 5, hostname: "n2" };
        let check = |template: &str, want: Result<&str, &str>| match (template.parse::<Prefix>(), want) {
            (Ok(prefix), Ok(want)) => assert_eq!(prefix.of(named), want, "{template}"),
            (Err(error), Err(want)) => assert!(error.contains(want), "{template}: {error}"),
            (got, want) => panic!("{template}: {got:?} and not {want:?}"),
        };
        check("[${role_name}${local_rank}]:", Ok("[trainer1]:"));
        check("$hostname:$rank: ", Ok("n2:5: "));
        check("$$rank costs $$5", Ok("$rank costs $5"));
        check("", Ok(""));
        check("no words ", Ok("no words "));
        check("${rnak}", Err("${rnak} is none of"));
        check("$", Err("${} is none of"));
        check("${rank", Err("no end"));
        assert_eq!(Prefix::default().of(named), "[rank5]: ");
    }
}
