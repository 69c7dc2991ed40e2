//! What a recipe says otherwise than an earlier one: for a run that goes on with settings that it didn't begin with. Whether
//! it may is not decided here.

use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// Every key that has another value in `now` than in `then`, both TOML, in words. What isn't TOML has no keys.
pub(crate) fn changes(then: &str, now: &str) -> Vec<String> {
    let (Ok(then), Ok(now)) = (then.parse(), now.parse()) else { return Vec::new() };
    let (then, now) = (flat(&then), flat(&now));
    let shown = |value: Option<&&Value>| value.map_or("the default".to_owned(), |value| value.to_string());
    differing(&then, &now)
        .map(|(key, then, now)| format!("{key} is {} and was {}", shown(now), shown(then)))
        .collect()
}

/// Every key that has another value in one than in the other, in order, with both.
pub(crate) fn differing<'a, V: PartialEq>(
    one: &'a BTreeMap<String, V>,
    other: &'a BTreeMap<String, V>,
) -> impl Iterator<Item = (&'a str, Option<&'a V>, Option<&'a V>)> {
    let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let both = keys.into_iter().map(|key| (key.as_str(), one.get(key), other.get(key)));
    both.filter(|(_, one, other)| one != other)
}

/// The values of a recipe's TOML under their dotted keys. What isn't TOML has none.
pub(crate) fn values(recipe: &str) -> BTreeMap<String, String> {
    let table: Table = recipe.parse().unwrap_or_default();
    flat(&table).into_iter().map(|(key, value)| (key, value.to_string())).collect()
}

/// The values of all sections under their dotted keys. What stands outside of a section is about the recipe.
fn flat(table: &Table) -> BTreeMap<String, &Value> {
    let sections = table.iter().filter_map(|(section, value)| Some((section, value.as_table()?)));
    sections
        .flat_map(|(section, keys)| keys.iter().map(move |(key, value)| (format!("{section}.{key}"), value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;

    #[test]
    fn what_differs_is_named_with_both_values() {
        let recipe = |set: &[&str]| {
            let mut recipe = Recipe::load("mnist", &[]).unwrap();
            recipe.set(set.iter().copied()).unwrap();
            recipe.to_toml()
        };
        let check = |then: &[&str], now: &[&str], want: &[&str]| {
            assert_eq!(changes(&recipe(then), &recipe(now)), want, "{then:?} {now:?}");
        };
        check(&[], &[], &[]);
        check(&["optimizer.lr=0.01"], &["optimizer.lr=0.5"], &["optimizer.lr is 0.5 and was 0.01"]);
        check(
            &["optimizer.weight_decay=0.1"],
            &["schedule.name=cosine", "schedule.floor=0.25"],
            &[
                "optimizer.weight_decay is the default and was 0.1",
                "schedule.floor is 0.25 and was the default",
                "schedule.name is \"cosine\" and was \"constant\"",
            ],
        );
        let about = recipe(&[]).replace("about = \"", "about = \"not ");
        assert_eq!(changes(&recipe(&[]), &about), [""; 0]);
        assert_eq!(changes("no TOML", &recipe(&[])), [""; 0]);
    }
}
