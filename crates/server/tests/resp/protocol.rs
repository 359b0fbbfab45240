//! Tests of the wire protocol: inline commands, lengths, and clients that violate the protocol.

use crate::listener::{TestListener, encode};

#[test]
fn lines_typed_by_hand_are_commands() {
    let listener = TestListener::open();
    assert_eq!(listener.converse(b"ping\n"), "+PONG\r\n");
    assert_eq!(
        listener.converse(b"  PING   \"a b\"  \r\n\r\n\n"),
        "$3\r\na b\r\n"
    );
    assert_eq!(
        listener.converse(b"CL.THROTTLE 'user 1' 15 30 60\r\n"),
        "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n"
    );
}

#[test]
fn empty_commands_are_skipped() {
    assert_eq!(
        TestListener::open().converse(b"*0\r\n*-1\r\n\r\nPING\r\n"),
        "+PONG\r\n"
    );
}

#[test]
fn an_incomplete_command_is_not_answered() {
    let listener = TestListener::open();
    for begun in [
        &b"PIN"[..],
        b"*1",
        b"*1\r\n$4\r\nPING",
        b"*1\r\n$4\r\nPING\r",
        b"*2\r\n$4\r\nPING\r\n",
    ] {
        assert_eq!(listener.converse(begun), "", "{}", begun.escape_ascii());
    }
}

#[test]
fn a_protocol_error_is_reported_and_closes_the_connection() {
    let broken: [(&[u8], &str); 15] = [
        (
            b"*1000000\r\n",
            "invalid multibulk length: at most 1024 arguments",
        ),
        (
            b"*1025\r\n",
            "invalid multibulk length: at most 1024 arguments",
        ),
        (b"*x\r\n", "invalid multibulk length"),
        (b"*\r\n", "invalid multibulk length"),
        (b"*1\rx", "invalid multibulk length"),
        (
            b"*99999999999999999999999999999999",
            "invalid multibulk length",
        ),
        (
            b"*1\r\n$65537\r\n",
            "invalid bulk length: at most 65536 bytes",
        ),
        (
            b"*1\r\n$999999999999\r\n",
            "invalid bulk length: at most 65536 bytes",
        ),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$\r\n", "invalid bulk length"),
        (b"*1\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n*1\r\n$4\r\nPING\r\n", "expected '$', got '*'"),
        (
            b"*1\r\n$4\r\nPINGER\r\n",
            "expected a line end after an argument",
        ),
        (b"PING \"a\r\n", "unbalanced quotes in request"),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "this is the Redis protocol, not HTTP",
        ),
    ];
    let listener = TestListener::open();
    for (input, problem) in broken {
        let answer = listener.converse(&[b"PING\r\n", input, b"PING\r\n"].concat());
        assert_eq!(
            answer,
            format!("+PONG\r\n-ERR Protocol error: {problem}\r\n"),
            "{}",
            input.escape_ascii()
        );
    }
}

#[test]
fn a_client_that_goes_on_after_an_error_still_reads_it() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    client.send(b"*1000000\r\n");
    client.send(&encode(&[b"ECHO", &[b'x'; 50_000]]).repeat(4));
    assert_eq!(
        client.rest(),
        "-ERR Protocol error: invalid multibulk length: at most 1024 arguments\r\n"
    );
}

#[test]
fn maximum_sizes_are_accepted_and_one_byte_more_is_not() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let longest = vec![b'x'; 65_536];
    let echoed = client.command_of(&[b"ECHO", &longest]);
    assert_eq!(echoed.to_string().len(), longest.len() + 2);
    let words = vec![&b"x"[..]; 1_024];
    assert!(
        client
            .command_of(&words)
            .to_string()
            .starts_with("-ERR unknown command 'x'")
    );
    let line = |words: usize| [b"ECHO ".to_vec(), vec![b'x'; words - 5], b"\n".to_vec()].concat();
    client.send(&line(65_536));
    assert_eq!(client.value().to_string().len(), 65_536 - 5 + 2);
    let too_long = listener.converse(&line(65_600));
    assert_eq!(
        too_long,
        "-ERR Protocol error: too big inline request: at most 65536 bytes\r\n"
    );
    let too_big = listener.converse(&encode(&[longest.as_slice(); 12]));
    assert_eq!(
        too_big,
        "-ERR Protocol error: too big command: at most 786432 bytes\r\n"
    );
}

#[test]
fn a_large_command_arrives_in_many_pieces() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let value = vec![b'v'; 8_192];
    let names: Vec<String> = (0..64).map(|n| format!("{n:0>256}")).collect();
    let mut words = vec![&b"TIDEGATE.CHECK"[..]];
    for name in &names {
        words.extend([name.as_bytes(), &value]);
    }
    for piece in encode(&words).chunks(10_007) {
        client.send(piece);
    }
    assert_eq!(client.value().to_string(), "[1, nil, -1, -1, 0, 0]");
    assert_eq!(client.command("PING").to_string(), "+PONG");
}

#[test]
fn invalid_commands_are_counted() {
    let listener = TestListener::open();
    listener
        .converse(b"GET x\r\nCL.THROTTLE x\r\nCL.THROTTLE x y 1 1\r\nTIDEGATE.CHECK a\r\n*x\r\n");
    let counted = "tidegate_bad_requests_total{listener=\"resp\"} 5";
    let metrics = listener.limiter.exposition();
    assert!(metrics.contains(counted), "{metrics}");
}
