//! Tests of `TIDEGATE.RESET` and `DEL`, and that each database has its own keys.

use crate::listener::{Client, TestListener};

fn limited(client: &mut Client, key: &str) -> bool {
    let answer = client.command(&format!("CL.THROTTLE {key} 0 1 3600"));
    answer.items()[0].to_string() == "1"
}

#[test]
fn a_reset_key_starts_afresh() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    for reset in ["TIDEGATE.RESET", "del", "UNLINK"] {
        assert!(
            !limited(&mut client, "a") && !limited(&mut client, "b"),
            "{reset}"
        );
        assert!(limited(&mut client, "a"));
        assert_eq!(
            client.command(&format!("{reset} a nobody b")).to_string(),
            "2"
        );
        assert_eq!(client.command(&format!("{reset} a b")).to_string(), "0");
    }
    let looked = client.command("CL.THROTTLE a 0 1 3600 0").to_string();
    assert_eq!(looked, "[0, 1, 1, -1, 0]", "a quantity of 0 inspects");
}

#[test]
fn a_reset_works_in_a_transaction() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    assert!(!limited(&mut client, "a"));
    assert_eq!(client.command("MULTI").to_string(), "+OK");
    for command in ["DEL a", "CL.THROTTLE a 0 1 3600", "TIDEGATE.RESET a"] {
        assert_eq!(client.command(command).to_string(), "+QUEUED");
    }
    let done = client.command("EXEC").to_string();
    assert_eq!(done, "[1, [0, 1, 0, -1, 3600], 1]");
}

#[test]
fn invalid_resets_are_rejected() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let many = format!("DEL{}", " k".repeat(65));
    let reply = client.command(&many).to_string();
    assert_eq!(reply, "-ERR 65 keys exceed the maximum of 64");
    let empty = client.command_of(&[b"DEL", b""]).to_string();
    assert_eq!(empty, "-ERR key: must not be empty");
    let none = client.command("DEL").to_string();
    assert_eq!(none, "-ERR wrong number of arguments for 'del' command");
}

/// The new process of an upgrade would keep the counters.
#[test]
fn a_reset_is_refused_after_the_state_has_moved() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    assert!(!limited(&mut client, "a"));
    listener.limiter.send_state(&mut |_, _| Ok(())).unwrap();
    for reset in ["TIDEGATE.RESET a", "DEL a", "UNLINK a"] {
        let reply = client.command(reset).to_string();
        let expected = "-ERR a new process has taken over from this process; repeat the request on a new connection";
        assert_eq!(reply, expected, "{reset}");
    }
    listener.limiter.take_back_state();
    assert!(limited(&mut client, "a"));
    assert_eq!(client.command("TIDEGATE.RESET a").to_string(), "1");
}

#[test]
fn databases_have_separate_keys() {
    let listener = TestListener::open();
    let (mut zero, mut one) = (listener.connect(), listener.connect());
    assert_eq!(one.command("SELECT 1").to_string(), "+OK");
    for key in ["k".as_bytes(), b"\xff", b"\xf7\x01k", b"\xf7\xf7"] {
        for client in [&mut zero, &mut one] {
            let words: [&[u8]; 5] = [b"CL.THROTTLE", key, b"0", b"1", b"3600"];
            let first = client.command_of(&words);
            assert_eq!(first.items()[0].to_string(), "0", "{key:?}");
            assert_eq!(client.command_of(&words).items()[0].to_string(), "1");
        }
    }
    assert_eq!(listener.limiter.local_store().stats().keys, 8);
    // Resetting a key in one database does not affect the counter of the same key in another
    // database. After `RESET`, a connection uses database 0.
    assert_eq!(one.command("DEL k").to_string(), "1");
    assert!(limited(&mut zero, "k") && !limited(&mut one, "k"));
    let line = one.command("CLIENT LIST").to_string();
    assert!(line.contains(" db=1 "), "{line}");
    one.command("RESET");
    assert!(limited(&mut one, "k"));
    zero.command("SELECT 15");
    let long = vec![b'x'; 1_023];
    let words: [&[u8]; 5] = [b"CL.THROTTLE", &long, b"0", b"1", b"3600"];
    let reply = zero.command_of(&words).to_string();
    assert!(
        reply.contains("1023 bytes exceeds the maximum of 1022"),
        "{reply}"
    );
    assert_eq!(one.command_of(&words).items()[0].to_string(), "0");
}
