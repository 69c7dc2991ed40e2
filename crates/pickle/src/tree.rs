//! From the machine's graph to a tree of values (P-BOUND in `machine.rs`).

use crate::error::Error;
use crate::machine::MAX_VALUES;
use crate::value::{Object, Value};
use std::borrow::Cow;

/// How deep values may lie in each other.
pub const MAX_DEPTH: usize = 64;

/// What even the smallest pickle may unfold to.
pub(crate) const SMALL: usize = 1024;

/// Where a value lies in the graph.
pub(crate) type Id = u32;

/// A value as the machine keeps it: what lies in it is referred to.
pub(crate) enum Node<'a> {
    Leaf(Value<'a>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Set(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// `args` is a tuple.
    Object {
        name: &'a str,
        args: Id,
        state: Option<Id>,
        items: Vec<(Id, Id)>,
    },
    Persistent(Id),
}

struct Tree<'n, 'a> {
    nodes: &'n [Node<'a>],
    left: usize,
    limit: usize,
}

/// The value of node `root`, as a tree. `n_bytes` is how long the pickle is.
pub(crate) fn unfold<'a>(nodes: &[Node<'a>], root: Id, n_bytes: usize) -> Result<Value<'a>, Error> {
    let limit = MAX_VALUES.min(2 * n_bytes + SMALL);
    Tree { nodes, left: limit, limit }.unfold(root, 0)
}

impl<'a> Tree<'_, 'a> {
    fn unfold(&mut self, id: Id, depth: usize) -> Result<Value<'a>, Error> {
        if depth > MAX_DEPTH {
            return Err(Error::TooDeep { limit: MAX_DEPTH });
        }
        let nodes = self.nodes;
        let node = &nodes[id as usize];
        let copied_bytes = match node {
            Node::Leaf(Value::Bytes(Cow::Owned(bytes))) => bytes.len(),
            Node::Leaf(Value::Str(Cow::Owned(text))) => text.len(),
            _ => 0,
        };
        let cost = 1 + copied_bytes / size_of::<Value>();
        self.left = self.left.checked_sub(cost).ok_or(Error::TooLarge { limit: self.limit })?;
        let depth = depth + 1;
        Ok(match node {
            Node::Leaf(value) => value.clone(),
            Node::List(ids) => Value::List(self.unfold_all(ids, depth)?),
            Node::Tuple(ids) => Value::Tuple(self.unfold_all(ids, depth)?),
            Node::Set(ids) => Value::Set(self.unfold_all(ids, depth)?),
            Node::Dict(items) => Value::Dict(self.unfold_items(items, depth)?),
            Node::Persistent(id) => Value::Persistent(Box::new(self.unfold(*id, depth)?)),
            Node::Object { name, args, state, items } => {
                let Node::Tuple(args) = &nodes[*args as usize] else {
                    unreachable!("a call checks that its arguments are a tuple, and no opcode changes one");
                };
                Value::Object(Box::new(Object {
                    name,
                    args: self.unfold_all(args, depth)?,
                    state: state.map(|id| self.unfold(id, depth)).transpose()?,
                    items: self.unfold_items(items, depth)?,
                }))
            }
        })
    }

    fn unfold_all(&mut self, ids: &[Id], depth: usize) -> Result<Vec<Value<'a>>, Error> {
        ids.iter().map(|&id| self.unfold(id, depth)).collect()
    }

    fn unfold_items(
        &mut self,
        items: &[(Id, Id)],
        depth: usize,
    ) -> Result<Vec<(Value<'a>, Value<'a>)>, Error> {
        items.iter().map(|&(key, value)| Ok((self.unfold(key, depth)?, self.unfold(value, depth)?))).collect()
    }
}
