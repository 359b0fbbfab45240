//! Tests of `MULTI`, `EXEC` and `DISCARD`, which many clients add to their pipelines.

use tidegate_server::listener::resp::bounds::{MAX_BULK_BYTES, MAX_COMMAND_BYTES};

use crate::listener::{TestListener, encode};

const THROTTLE: &[u8] = b"CL.THROTTLE user 1 1 60\r\n";

#[test]
fn a_transaction_is_answered_at_exec() {
    let listener = TestListener::open();
    let input = [
        b"MULTI\r\n",
        THROTTLE,
        b"PING\r\n",
        THROTTLE,
        THROTTLE,
        b"EXEC\r\nPING\r\n",
    ]
    .concat();
    let expected = "+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*4\r\n\
        *5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:60\r\n+PONG\r\n*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:120\r\n\
        *5\r\n:1\r\n:2\r\n:0\r\n:60\r\n:120\r\n+PONG\r\n";
    assert_eq!(listener.converse(&input), expected);
}

#[test]
fn an_empty_transaction_has_an_empty_reply() {
    let answers = TestListener::open().converse(b"MULTI\r\nEXEC\r\nMULTI\r\nDISCARD\r\nPING\r\n");
    assert_eq!(answers, "+OK\r\n*0\r\n+OK\r\n+OK\r\n+PONG\r\n");
}

#[test]
fn an_invalid_transaction_is_not_run() {
    for (spoils, error) in [
        (
            &b"GET x\r\n"[..],
            "-ERR unknown command 'GET', with args beginning with: 'x' \r\n",
        ),
        (
            b"ECHO\r\n",
            "-ERR wrong number of arguments for 'echo' command\r\n",
        ),
        (
            b"INFO\r\n",
            "-ERR 'info' is not allowed in a transaction\r\n",
        ),
    ] {
        let listener = TestListener::open();
        let input = [b"MULTI\r\n", THROTTLE, spoils, THROTTLE, b"EXEC\r\n"].concat();
        let expected = format!(
            "+OK\r\n+QUEUED\r\n{error}+QUEUED\r\n\
             -EXECABORT Transaction discarded because of previous errors.\r\n"
        );
        assert_eq!(listener.converse(&input), expected);
        assert_eq!(listener.limiter.local_store().stats().keys, 0);
    }
}

#[test]
fn a_command_that_fails_at_exec_fails_alone() {
    let input = [
        b"MULTI\r\nCL.THROTTLE user x 1 60\r\n",
        THROTTLE,
        b"EXEC\r\n",
    ]
    .concat();
    let expected = "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n\
        -Cell error: Store error: Couldn't parse as integer: x\r\n*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:60\r\n";
    assert_eq!(TestListener::open().converse(&input), expected);
}

#[test]
fn misplaced_transaction_commands_are_rejected() {
    let listener = TestListener::open();
    for (input, expected) in [
        (&b"EXEC\r\n"[..], "-ERR EXEC without MULTI\r\n"),
        (b"DISCARD\r\n", "-ERR DISCARD without MULTI\r\n"),
        (
            b"MULTI\r\nMULTI\r\nEXEC\r\n",
            "+OK\r\n-ERR MULTI calls can not be nested\r\n*0\r\n",
        ),
        (
            b"MULTI\r\nRESET\r\nEXEC\r\n",
            "+OK\r\n+RESET\r\n-ERR EXEC without MULTI\r\n",
        ),
        (b"MULTI\r\nQUIT\r\n", "+OK\r\n+OK\r\n"),
    ] {
        assert_eq!(
            listener.converse(input),
            expected,
            "{}",
            input.escape_ascii()
        );
    }
}

#[test]
fn the_length_of_a_transaction_is_limited() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let long = encode(&[b"ECHO", &[b'x'; MAX_BULK_BYTES]]);
    client.send(b"MULTI\r\n");
    assert_eq!(client.value().to_string(), "+OK");
    for _ in 0..MAX_COMMAND_BYTES / long.len() {
        client.send(&long);
        assert_eq!(client.value().to_string(), "+QUEUED");
    }
    client.send(&long);
    let refused = "-ERR the transaction is too long: at most 786432 bytes";
    assert_eq!(client.value().to_string(), refused);
    client.send(b"EXEC\r\n");
    assert!(client.value().to_string().starts_with("-EXECABORT"));
}
