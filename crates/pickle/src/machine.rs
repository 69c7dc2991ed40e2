//! The machine: a stack, marks in it, and a memo.
//!
//! A pickle builds its values from below and can go on filling a list after it was put into another, so while the machine
//! runs every value is a node of a graph and refers to others by number. After the last opcode the graph is unfolded into a
//! tree from the node on top of the stack; a node that several others refer to is then copied.
//!
//! **P-INERT**: reading runs nothing that the pickle names. A global is checked against the caller's list by the opcode that
//! names it and becomes a word; a call becomes a node. There is no third thing that a name is used for.
//!
//! **P-BOUND**: what is kept in memory is bounded. Every push and every entry of the memo counts as one value, as does every
//! node of the tree, and both counts end at [`MAX_VALUES`]; the tree, which copies, may besides have no more than two values
//! for each byte of input (and some, for small ones). Long text is borrowed, and counts where it can't be. A length that the
//! pickle states is compared with what is left before anything is made of it. The unfolding (`tree.rs`), which recurses, goes no
//! deeper than [`MAX_DEPTH`](crate::MAX_DEPTH), and so a value that holds itself ends there too.

use crate::error::Error;
use crate::text;
use crate::tree::{Id, Node, unfold};
use crate::value::Value;
use std::borrow::Cow;
use std::collections::HashMap;

/// The most values that a pickle may hold. A state dict takes about forty for each tensor.
pub const MAX_VALUES: usize = 1 << 22;

/// Reads the pickle that `input` starts with, and moves `input` behind it. It may name the functions and classes in
/// `globals`, each as `module.name`, and no other.
pub fn read<'a>(input: &mut &'a [u8], globals: &[&'a str]) -> Result<Value<'a>, Error> {
    let mut machine = Machine {
        input,
        at: 0,
        opcode_at: 0,
        globals,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        left: MAX_VALUES,
    };
    while machine.step()? {}
    let root = machine.pop()?;
    let value = unfold(&machine.nodes, root, input.len())?;
    *input = &input[machine.at..];
    Ok(value)
}

struct Machine<'a, 'g> {
    input: &'a [u8],
    at: usize,
    opcode_at: usize,
    globals: &'g [&'a str],
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    /// How high the stack was at each mark that is still open.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    left: usize,
}

impl<'a> Machine<'a, '_> {
    /// Carries out one opcode; false at the last.
    fn step(&mut self) -> Result<bool, Error> {
        self.opcode_at = self.at;
        match self.byte()? {
            // How the pickle is written: PROTO, FRAME, STOP.
            0x80 => match self.byte()? {
                0..=5 => {}
                other => return Err(self.invalid(format!("protocol {other}: 0 to 5 are known"))),
            },
            0x95 => {
                let len = self.u64()?;
                let left = (self.input.len() - self.at) as u64;
                if len > left {
                    return Err(Error::Cut { at: self.input.len(), wanted: len - left });
                }
            }
            b'.' => return Ok(false),

            // Atoms: NONE, NEWTRUE, NEWFALSE, the integers from INT to LONG4, FLOAT, BINFLOAT.
            b'N' => self.leaf(Value::None)?,
            0x88 => self.leaf(Value::Bool(true))?,
            0x89 => self.leaf(Value::Bool(false))?,
            b'I' => match self.line()? {
                b"00" => self.leaf(Value::Bool(false))?,
                b"01" => self.leaf(Value::Bool(true))?,
                digits => self.number(digits)?,
            },
            b'L' => {
                let line = self.line()?;
                self.number(line.strip_suffix(b"L").unwrap_or(line))?;
            }
            b'K' => {
                let number = self.byte()?;
                self.leaf(Value::Int(number.into()))?;
            }
            b'M' => {
                let number = u16::from_le_bytes(self.array()?);
                self.leaf(Value::Int(number.into()))?;
            }
            b'J' => {
                let number = i32::from_le_bytes(self.array()?);
                self.leaf(Value::Int(number.into()))?;
            }
            0x8a => {
                let len = self.byte()?;
                self.long(len.into())?;
            }
            0x8b => {
                let len = self.u32()?;
                self.long(len.into())?;
            }
            b'F' => {
                let line = self.line()?;
                let number = std::str::from_utf8(line).ok().and_then(|digits| digits.parse().ok());
                let number = number.ok_or_else(|| self.invalid(format!("no float: {}", shown(line))))?;
                self.leaf(Value::Float(number))?;
            }
            b'G' => {
                let number = f64::from_be_bytes(self.array()?);
                self.leaf(Value::Float(number))?;
            }

            // Strings of Python 2: STRING, BINSTRING, SHORT_BINSTRING.
            b'S' => {
                let line = self.line()?;
                let bytes =
                    text::quoted(line).ok_or_else(|| self.invalid(format!("no string: {}", shown(line))))?;
                self.leaf(Value::Bytes(bytes))?;
            }
            b'T' => {
                let len = self.u32()?;
                self.bytes(len.into())?;
            }
            b'U' => {
                let len = self.byte()?;
                self.bytes(len.into())?;
            }
            // Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
            b'B' => {
                let len = self.u32()?;
                self.bytes(len.into())?;
            }
            b'C' => {
                let len = self.byte()?;
                self.bytes(len.into())?;
            }
            0x8e | 0x96 => {
                let len = self.u64()?;
                self.bytes(len)?;
            }
            // Text: UNICODE, BINUNICODE, SHORT_BINUNICODE, BINUNICODE8.
            b'V' => {
                let line = self.line()?;
                let text = text::raw_unicode(line)
                    .ok_or_else(|| self.invalid(format!("no text: {}", shown(line))))?;
                self.leaf(Value::Str(text))?;
            }
            b'X' => {
                let len = self.u32()?;
                self.utf8(len.into())?;
            }
            0x8c => {
                let len = self.byte()?;
                self.utf8(len.into())?;
            }
            0x8d => {
                let len = self.u64()?;
                self.utf8(len)?;
            }

            // The stack: MARK, POP, POP_MARK, DUP.
            b'(' => {
                self.charge(1)?;
                self.marks.push(self.stack.len());
            }
            b'0' => {
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    self.pop()?;
                }
            }
            b'1' => drop(self.since_mark()?),
            b'2' => {
                let top = self.pop()?;
                self.push_id(top)?;
                self.push_id(top)?;
            }

            // Tuples: EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3.
            b')' => self.push(Node::Tuple(Vec::new()))?,
            b't' => {
                let elements = self.since_mark()?;
                self.push(Node::Tuple(elements))?;
            }
            n @ 0x85..=0x87 => {
                let elements = self.popped(usize::from(n - 0x84))?;
                self.push(Node::Tuple(elements))?;
            }
            // Lists: EMPTY_LIST, LIST, APPEND, APPENDS.
            b']' => self.push(Node::List(Vec::new()))?,
            b'l' => {
                let elements = self.since_mark()?;
                self.push(Node::List(elements))?;
            }
            b'a' => {
                let element = self.popped(1)?;
                self.append(element)?;
            }
            b'e' => {
                let elements = self.since_mark()?;
                self.append(elements)?;
            }
            // Dicts: EMPTY_DICT, DICT, SETITEM, SETITEMS.
            b'}' => self.push(Node::Dict(Vec::new()))?,
            b'd' => {
                let items = self.since_mark()?;
                self.push(Node::Dict(Vec::new()))?;
                self.set_items(&items)?;
            }
            b's' => {
                let item = self.popped(2)?;
                self.set_items(&item)?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.set_items(&items)?;
            }
            // Sets: EMPTY_SET, ADDITEMS, FROZENSET.
            0x8f => self.push(Node::Set(Vec::new()))?,
            0x90 => {
                let added = self.since_mark()?;
                match self.top()? {
                    Node::Set(elements) => elements.extend(added),
                    _ => return Err(self.invalid("only a set takes elements this way".into())),
                }
            }
            0x91 => {
                let elements = self.since_mark()?;
                self.push(Node::Set(elements))?;
            }

            // The memo: PUT, BINPUT, LONG_BINPUT, MEMOIZE, GET, BINGET, LONG_BINGET.
            b'p' => {
                let index = self.index()?;
                self.put(index)?;
            }
            b'q' => {
                let index = self.byte()?;
                self.put(index.into())?;
            }
            b'r' => {
                let index = self.u32()?;
                self.put(index.into())?;
            }
            0x94 => self.put(self.memo.len() as u64)?,
            b'g' => {
                let index = self.index()?;
                self.recall(index)?;
            }
            b'h' => {
                let index = self.byte()?;
                self.recall(index.into())?;
            }
            b'j' => {
                let index = self.u32()?;
                self.recall(index.into())?;
            }

            // Names and calls: GLOBAL, STACK_GLOBAL, REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ, BUILD.
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => {
                let ids = self.popped(2)?;
                match (&self.nodes[ids[0] as usize], &self.nodes[ids[1] as usize]) {
                    (Node::Leaf(Value::Str(module)), Node::Leaf(Value::Str(name))) => {
                        let (module, name) = (module.clone(), name.clone());
                        self.global(module.as_bytes(), name.as_bytes())?;
                    }
                    _ => return Err(self.invalid("a name must be two pieces of text".into())),
                }
            }
            b'R' | 0x81 => {
                let parts = self.popped(2)?;
                self.call(parts[0], parts[1])?;
            }
            0x92 => {
                let parts = self.popped(3)?;
                match &self.nodes[parts[2] as usize] {
                    Node::Dict(named) if named.is_empty() => self.call(parts[0], parts[1])?,
                    _ => return Err(self.invalid("calls with named arguments are not read".into())),
                }
            }
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                let args = self.since_mark()?;
                self.global(module, name)?;
                self.push(Node::Tuple(args))?;
                let parts = self.popped(2)?;
                self.call(parts[0], parts[1])?;
            }
            b'o' => {
                let mut args = self.since_mark()?;
                if args.is_empty() {
                    return Err(self.invalid("a call of nothing".into()));
                }
                let callee = args.remove(0);
                self.push(Node::Tuple(args))?;
                let args = self.pop()?;
                self.call(callee, args)?;
            }
            b'b' => {
                let with = self.pop()?;
                match self.top()? {
                    Node::Object { state: state @ None, .. } => *state = Some(with),
                    _ => return Err(self.invalid("only what a call made takes a state, and once".into())),
                }
            }

            // References to the outside: PERSID, BINPERSID.
            b'P' => {
                let line = self.line()?;
                let id = text::raw_unicode(line)
                    .ok_or_else(|| self.invalid(format!("no text: {}", shown(line))))?;
                self.leaf(Value::Str(id))?;
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }

            // EXT1 to EXT4 name globals by a number that only the writer knows, NEXT_BUFFER and READONLY_BUFFER bytes that lie
            // elsewhere.
            other => {
                return Err(self.invalid(format!("opcode {other:#04x} is none that data needs")));
            }
        }
        Ok(true)
    }

    fn invalid(&self, reason: String) -> Error {
        Error::Invalid { at: self.opcode_at, reason }
    }

    fn charge(&mut self, n: usize) -> Result<(), Error> {
        self.left = self.left.checked_sub(n).ok_or(Error::TooLarge { limit: MAX_VALUES })?;
        Ok(())
    }

    // What follows an opcode.

    fn take(&mut self, len: u64) -> Result<&'a [u8], Error> {
        let rest = &self.input[self.at..];
        let taken = usize::try_from(len).ok().and_then(|len| rest.get(..len));
        let taken = taken
            .ok_or(Error::Cut { at: self.input.len(), wanted: len.saturating_sub(rest.len() as u64) })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        Ok(self.take(N as u64)?.try_into().expect("N bytes were taken"))
    }

    fn byte(&mut self) -> Result<u8, Error> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// What stands before the next end of a line.
    fn line(&mut self) -> Result<&'a [u8], Error> {
        let rest = &self.input[self.at..];
        let len = rest.iter().position(|&b| b == b'\n');
        let len = len.ok_or(Error::Cut { at: self.input.len(), wanted: 1 })?;
        self.at += len + 1;
        Ok(&rest[..len])
    }

    fn index(&mut self) -> Result<u64, Error> {
        let line = self.line()?;
        let index = std::str::from_utf8(line).ok().and_then(|digits| digits.parse().ok());
        index.ok_or_else(|| self.invalid(format!("no number of the memo: {}", shown(line))))
    }

    // Atoms.

    fn number(&mut self, digits: &[u8]) -> Result<(), Error> {
        let number = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok());
        let number =
            number.ok_or_else(|| self.invalid(format!("no integer of up to 128 bits: {}", shown(digits))))?;
        self.leaf(Value::Int(number))
    }

    /// An integer of `len` bytes, the lowest first, in two's complement.
    fn long(&mut self, len: u64) -> Result<(), Error> {
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|&b| b >= 0x80);
        let mut all = if negative { [0xff; 16] } else { [0; 16] };
        let Some(low) = all.get_mut(..bytes.len()) else {
            return Err(self.invalid(format!("an integer of {len} bytes: at most 16 are read")));
        };
        low.copy_from_slice(bytes);
        self.leaf(Value::Int(i128::from_le_bytes(all)))
    }

    fn bytes(&mut self, len: u64) -> Result<(), Error> {
        let bytes = self.take(len)?;
        self.leaf(Value::Bytes(Cow::Borrowed(bytes)))
    }

    fn utf8(&mut self, len: u64) -> Result<(), Error> {
        let bytes = self.take(len)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| self.invalid(format!("text that is not UTF-8: {}", shown(bytes))))?;
        self.leaf(Value::Str(Cow::Borrowed(text)))
    }

    // The stack and the memo.

    fn leaf(&mut self, value: Value<'a>) -> Result<(), Error> {
        self.push(Node::Leaf(value))
    }

    fn push(&mut self, node: Node<'a>) -> Result<(), Error> {
        let id = self.nodes.len() as Id;
        self.push_id(id)?;
        self.nodes.push(node);
        Ok(())
    }

    fn push_id(&mut self, id: Id) -> Result<(), Error> {
        self.charge(1)?;
        self.stack.push(id);
        Ok(())
    }

    /// How high the stack must stay: what lies below an open mark is out of reach.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id, Error> {
        if self.stack.len() <= self.floor() {
            return Err(self.invalid("nothing is left to take".into()));
        }
        Ok(self.stack.pop().expect("higher than the floor"))
    }

    /// The top `n`, the lowest first.
    fn popped(&mut self, n: usize) -> Result<Vec<Id>, Error> {
        if self.stack.len() < self.floor() + n {
            return Err(self.invalid(format!("fewer than {n} values are left to take")));
        }
        Ok(self.stack.split_off(self.stack.len() - n))
    }

    fn since_mark(&mut self) -> Result<Vec<Id>, Error> {
        let mark = self.marks.pop().ok_or_else(|| self.invalid("no mark is open".into()))?;
        Ok(self.stack.drain(mark..).collect())
    }

    /// The node on top, to be filled.
    fn top(&mut self) -> Result<&mut Node<'a>, Error> {
        let id = self.pop()?;
        self.stack.push(id);
        Ok(&mut self.nodes[id as usize])
    }

    fn put(&mut self, index: u64) -> Result<(), Error> {
        self.charge(1)?;
        let id = self.pop()?;
        self.stack.push(id);
        self.memo.insert(index, id);
        Ok(())
    }

    fn recall(&mut self, index: u64) -> Result<(), Error> {
        let id = self.memo.get(&index).copied();
        let id = id.ok_or_else(|| self.invalid(format!("the memo has nothing under {index}")))?;
        self.push_id(id)
    }

    // Containers, names and calls.

    fn append(&mut self, added: Vec<Id>) -> Result<(), Error> {
        match self.top()? {
            Node::List(elements) => elements.extend(added),
            _ => return Err(self.invalid("only a list takes elements this way".into())),
        }
        Ok(())
    }

    fn set_items(&mut self, added: &[Id]) -> Result<(), Error> {
        let (pairs, []) = added.as_chunks::<2>() else {
            return Err(self.invalid("a key without a value".into()));
        };
        match self.top()? {
            Node::Dict(items) | Node::Object { items, .. } => {
                items.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            _ => return Err(self.invalid("only a dict or what a call made takes keys".into())),
        }
        Ok(())
    }

    /// The only way for a name to get in (P-INERT).
    fn global(&mut self, module: &[u8], name: &[u8]) -> Result<(), Error> {
        let is_it = |listed: &&&str| {
            listed.as_bytes().strip_prefix(module).and_then(|rest| rest.strip_prefix(b".")) == Some(name)
        };
        match self.globals.iter().find(is_it) {
            Some(listed) => self.leaf(Value::Global(listed)),
            None => Err(Error::Refused { name: format!("{}.{}", shown(module), shown(name)) }),
        }
    }

    fn call(&mut self, callee: Id, args: Id) -> Result<(), Error> {
        let Node::Leaf(Value::Global(name)) = self.nodes[callee as usize] else {
            return Err(self.invalid("a call of something that isn't a name".into()));
        };
        let Node::Tuple(_) = self.nodes[args as usize] else {
            return Err(self.invalid(format!("{name} is called with something that isn't a tuple")));
        };
        self.push(Node::Object { name, args, state: None, items: Vec::new() })
    }
}

/// Bytes of the pickle for a message: what can't be printed is escaped, and what is long cut off.
fn shown(bytes: &[u8]) -> String {
    const MOST: usize = 80;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MOST)]);
    let dots = if bytes.len() > MOST { "..." } else { "" };
    format!("{}{dots}", text.escape_debug())
}

#[cfg(test)]
mod tests;
