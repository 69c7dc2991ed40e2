use super::*;
use crate::tree::{MAX_DEPTH, SMALL};
use crate::value::Object;

const GLOBALS: &[&str] = &["torch.Size", "a.b.c"];

fn value(bytes: &'static [u8]) -> Value<'static> {
    read(&mut &*bytes, GLOBALS).unwrap_or_else(|error| panic!("{}: {error}", bytes.escape_ascii()))
}

fn error(bytes: &[u8]) -> String {
    match read(&mut &*bytes, GLOBALS) {
        Ok(value) => panic!("{}: {value:?}", bytes.escape_ascii()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_follows_the_pickle_is_left() {
    let mut bytes: &[u8] = b"K\x01.K\x02.rest";
    assert_eq!(read(&mut bytes, &[]), Ok(Value::Int(1)));
    assert_eq!(read(&mut bytes, &[]), Ok(Value::Int(2)));
    assert_eq!(bytes, b"rest");
}

#[test]
fn integers_have_either_sign_and_up_to_128_bits() {
    let check = |bytes: &'static [u8], want: i128| assert_eq!(value(bytes), Value::Int(want));
    check(b"J\xff\xff\xff\xff.", -1);
    check(b"M\xff\xff.", 65535);
    check(b"\x8a\x00.", 0);
    check(b"\x8a\x01\x80.", -128);
    check(b"\x8a\x02\x80\x00.", 128);
    check(b"\x8b\x02\x00\x00\x00\x00\x80.", -32768);
    check(b"L-5L\n.", -5);
    check(b"I10\n.", 10);
    assert!(error(&[b"\x8a\x11".as_slice(), &[1; 17], b"."].concat()).contains("17 bytes: at most 16"));
}

#[test]
fn strings_of_python_2_are_bytes() {
    let check = |bytes: &'static [u8]| assert_eq!(value(bytes), Value::Bytes(b"a\xff".as_slice().into()));
    check(b"U\x02a\xff.");
    check(b"T\x02\x00\x00\x00a\xff.");
    check(b"S'a\\xff'\n.");
    assert_eq!(value(b"(dU\x01aK\x01s.").get("a"), Some(&Value::Int(1)));
}

#[test]
fn a_list_can_be_filled_after_it_was_put_into_another() {
    // outer = [[], the same]; inner.append(7)
    let inner = Value::List(vec![Value::Int(7)]);
    assert_eq!(value(b"](]q\x00h\x00h\x00K\x07a0e."), Value::List(vec![inner.clone(), inner]));
}

#[test]
fn a_mark_can_be_dropped() {
    assert_eq!(value(b"K\x01(0."), Value::Int(1));
    assert_eq!(value(b"K\x01(NN1."), Value::Int(1));
}

#[test]
fn calls_become_objects_whatever_opcode_makes_them() {
    let want = |state, items| {
        let args = vec![Value::Int(1)];
        Value::Object(Box::new(Object { name: "torch.Size", args, state, items }))
    };
    for bytes in [
        &b"ctorch\nSize\n(K\x01tR."[..],
        b"ctorch\nSize\nK\x01\x85\x81.",
        b"ctorch\nSize\nK\x01\x85}\x92.",
        b"(K\x01itorch\nSize\n.",
        b"(ctorch\nSize\nK\x01o.",
        b"\x8c\x05torch\x8c\x04Size\x93K\x01\x85R.",
    ] {
        assert_eq!(value(bytes), want(None, vec![]), "{}", bytes.escape_ascii());
    }
    let filled = value(b"ctorch\nSize\nK\x01\x85RK\x02K\x03sK\x04b.");
    assert_eq!(filled, want(Some(Value::Int(4)), vec![(Value::Int(2), Value::Int(3))]));
    assert_eq!(value(b"ca.b\nc\n."), Value::Global("a.b.c"));
    assert_eq!(value(b"Pkey\n."), Value::Persistent(Box::new(Value::Str("key".into()))));
}

#[test]
fn other_names_are_refused_at_once() {
    let check = |bytes: &[u8], name: &str| {
        assert!(error(bytes).contains(&format!("asks for {name}, which is not on the list: refused")));
    };
    // Nothing follows the name: it is refused before more is read.
    check(b"cposix\nsystem\n", "posix.system");
    check(b"\x8c\x05posix\x8c\x06system\x93", "posix.system");
    check(b"(iposix\nsystem\n", "posix.system");
    check(b"ctorch\nSizes\n", "torch.Sizes");
    check(b"c\ntorch.Size\n", ".torch.Size");
    check(b"ctorc\nh.Size\n", "torc.h.Size");
    check(b"c\x1b[31m\n\xff\n", "\\u{1b}[31m.\u{fffd}");
    check(&[b"c".as_slice(), &[b'x'; 1000], b"\ny\n"].concat(), &format!("{}....y", "x".repeat(80)));
}

#[test]
fn broken_pickles_are_errors_that_say_where_and_why() {
    let check = |bytes: &[u8], why: &str| {
        let error = error(bytes);
        assert!(error.contains(why), "{}: {error}, expected {why}", bytes.escape_ascii());
    };
    check(b"", "ends in byte 0, where 1 more");
    check(b"K\x01", "ends in byte 2");
    check(b".", "byte 0: nothing is left to take");
    check(b"(.", "byte 1: nothing is left to take");
    check(b"\x80\x06.", "protocol 6");
    check(b"t.", "no mark is open");
    check(b"(NNNd.", "a key without a value");
    check(b"NNa.", "only a list");
    check(b"NNNs.", "only a dict");
    check(b"N(\x90.", "only a set");
    check(b"NNb.", "only what a call made takes a state");
    check(b"ctorch\nSize\n)RNbNb.", "a state, and once");
    check(b"N)R.", "something that isn't a name");
    check(b"ctorch\nSize\nNR.", "torch.Size is called with something that isn't a tuple");
    check(b"ctorch\nSize\n)}K\x01K\x02s\x92.", "named arguments");
    check(b"(o.", "a call of nothing");
    check(b"NN\x93.", "two pieces of text");
    check(b"h\x05.", "the memo has nothing under 5");
    check(b"gx\n.", "no number of the memo: x");
    check(b"I1.5\n.", "no integer of up to 128 bits: 1.5");
    check(b"Fabout one\n.", "no float: about one");
    check(b"Sabc\n.", "no string: abc");
    check(b"V\\u12\n.", "no text");
    check(b"X\x01\x00\x00\x00\xff.", "not UTF-8");
    check(b"\x82\x01.", "opcode 0x82 is none that data needs");
    check(b"X\xff\xff\xff\xffabc", "where 4294967292 more");
    check(b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff", "where 18446744073709551615 more");
    check(b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", "more were expected");
}

/// P-BOUND: each round doubles what the value unfolds to.
#[test]
fn a_value_that_unfolds_to_more_than_its_length_justifies_is_an_error() {
    let mut bytes = b"K\x01".to_vec();
    for _ in 0..40 {
        bytes.extend(b"2\x86");
    }
    bytes.push(b'.');
    assert!(error(&bytes).contains(&format!("more than {} values", 2 * bytes.len() + SMALL)));
}

/// P-BOUND: text that had to be decoded is copied, so it counts by its length.
#[test]
fn copies_of_decoded_text_count() {
    let text = ["x"; 10_000].concat();
    let mut bytes = format!("(V\\u0041{text}\np0\n").into_bytes();
    bytes.extend(b"h\x00".repeat(500));
    bytes.extend(b"t.");
    assert!(error(&bytes).contains("it unfolds to more than"));
}

/// P-BOUND: what is pushed and dropped again counts too.
#[test]
fn more_values_than_are_ever_read_are_an_error() {
    let check = |round: &[u8]| {
        let bytes = [b"N".as_slice(), &round.repeat(MAX_VALUES + 1), b"."].concat();
        assert_eq!(read(&mut bytes.as_slice(), &[]), Err(Error::TooLarge { limit: MAX_VALUES }));
    };
    check(b"N");
    check(b"N0");
    check(b"(");
    check(b"\x94");
}

#[test]
fn depth_is_bounded_and_no_value_holds_itself() {
    let nested = |depth: usize| [b")".as_slice(), &b"\x85".repeat(depth), b"."].concat();
    assert!(read(&mut nested(MAX_DEPTH).as_slice(), &[]).is_ok());
    assert!(error(&nested(MAX_DEPTH + 1)).contains("nest deeper than 64"));
    assert!(error(&nested(1_000_000)).contains("nest deeper than 64"));
    assert!(error(b"]q\x00h\x00a.").contains("or hold themselves"));
}
