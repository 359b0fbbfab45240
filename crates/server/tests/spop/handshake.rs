//! Tests of the handshake, health checks, and closing a connection.

use std::time::Duration;

use crate::haproxy::{
    AGENT_HELLO, Argument, DISCONNECT, HELLO, NOTIFY, TestListener, frame, hello, items,
    max_frame_size, notify,
};

#[test]
fn the_smaller_frame_length_and_the_common_capabilities_are_agreed_on() {
    let listener = TestListener::open("");
    for (offered, agreed) in [(16_380, "16380"), (256, "256"), (1 << 20, "65532")] {
        let mut client = listener.connect();
        client.send(&hello(offered));
        let answer = client.frame().unwrap();
        assert_eq!((answer.kind, answer.ids), (AGENT_HELLO, (0, 0)));
        let items = answer.items();
        let items: Vec<(&str, &str)> = items.iter().map(|(a, b)| (&**a, &**b)).collect();
        let expected = [
            ("capabilities", "pipelining"),
            ("max-frame-size", agreed),
            ("version", "2.0"),
        ];
        assert_eq!(items, expected);
    }
}

/// TCP may deliver any part of a frame at any time.
#[test]
fn a_hello_in_two_segments_is_one_frame() {
    let listener = TestListener::open("");
    let hello = hello(16_380);
    for at in [1, 4, 5, 9, 11, hello.len() / 2, hello.len() - 1] {
        let mut client = listener.connect();
        client.send(&hello[..at]);
        // Wait until the listener has read the first segment.
        std::thread::park_timeout(Duration::from_millis(20));
        client.send(&hello[at..]);
        assert_eq!(client.frame().unwrap().kind, AGENT_HELLO, "split at {at}");
        assert!(client.notify(&[]).variables().contains_key("allowed"));
    }
}

#[test]
fn every_byte_may_arrive_alone() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    for byte in hello(16_380).into_iter().chain(notify((300, 2), &[])) {
        client.send(&[byte]);
    }
    assert_eq!(client.frame().unwrap().kind, AGENT_HELLO);
    assert_eq!(client.frame().unwrap().ids, (300, 2));
}

#[test]
fn a_health_check_ends_with_the_hello() {
    let listener = TestListener::open("");
    let mut payload = items(&[
        ("supported-versions", Argument::Text(b"2.0")),
        ("capabilities", Argument::Text(b"")),
        ("healthcheck", Argument::Bool(true)),
    ]);
    payload.extend(max_frame_size(16_380));
    let mut client = listener.connect();
    client.send(&frame(HELLO, 1, (0, 0), &payload));
    let answer = client.frame().unwrap();
    assert_eq!(answer.kind, AGENT_HELLO);
    assert_eq!(answer.items()["capabilities"], "");
    assert!(client.frame().is_none());
}

#[test]
fn a_hello_that_cannot_be_accepted_is_answered_with_the_reason() {
    let listener = TestListener::open("");
    let versions = |list| items(&[("supported-versions", Argument::Text(list))]);
    let capabilities = items(&[("capabilities", Argument::Text(b"pipelining"))]);
    let size = max_frame_size(16_380);
    for (payload, status, message) in [
        (
            [&size[..], &capabilities].concat(),
            5,
            "supported-versions is missing",
        ),
        (
            [&versions(b"2.0"), &capabilities[..]].concat(),
            6,
            "max-frame-size is missing",
        ),
        (
            [&versions(b"2.0"), &size[..]].concat(),
            7,
            "capabilities is missing",
        ),
        (
            [&versions(b"1.0, 3.0"), &size[..], &capabilities].concat(),
            8,
            "only version 2.0 is supported",
        ),
        (
            [&versions(b"2.0"), &max_frame_size(255)[..], &capabilities].concat(),
            9,
            "max-frame-size must be at least 256",
        ),
        (b"\xff\xff\xff".to_vec(), 4, "the frame is malformed"),
    ] {
        let mut client = listener.connect();
        client.send(&frame(HELLO, 1, (0, 0), &payload));
        assert_eq!(client.expect_disconnect(status), message);
    }
    let mut client = listener.connect();
    let accepted = [&versions(b" 1.5 , 2.1"), &size[..], &capabilities].concat();
    client.send(&frame(HELLO, 1, (0, 0), &accepted));
    assert_eq!(client.frame().unwrap().kind, AGENT_HELLO);
}

#[test]
fn frames_out_of_order_end_the_connection() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    client.send(&notify((1, 1), &[]));
    client.expect_disconnect(4);
    let mut client = listener.connect_and_handshake();
    client.send(&hello(16_380));
    client.expect_disconnect(4);
    // An HTTP request and a TLS ClientHello are not frames.
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01",
    ] {
        let mut client = listener.connect();
        client.send(bytes);
        let message = client.expect_disconnect(3);
        assert!(message.contains("not a HAPROXY-HELLO"), "{message}");
    }
    let exposition = listener.limiter.exposition();
    let counted = "tidegate_bad_requests_total{listener=\"spop\"} 4\n";
    assert!(exposition.contains(counted), "{exposition}");
}

#[test]
fn fragments_are_rejected() {
    let listener = TestListener::open("");
    for bytes in [
        frame(NOTIFY, 0, (1, 1), b"\x05check\x00"),
        frame(0, 1, (1, 1), b""),
    ] {
        let mut client = listener.connect_and_handshake();
        client.send(&bytes);
        assert!(client.expect_disconnect(10).contains("fragmentation"));
    }
}

#[test]
fn unknown_frames_are_ignored() {
    let listener = TestListener::open("");
    let mut client = listener.connect_and_handshake();
    client.send(&frame(99, 1, (1, 1), b"anything"));
    assert_eq!(client.notify(&[]).ids, (7, 1));
}

#[test]
fn a_disconnect_is_answered() {
    let listener = TestListener::open("");
    let mut client = listener.connect_and_handshake();
    let payload = items(&[("message", Argument::Text(b"bye"))]);
    client.send(&frame(DISCONNECT, 1, (0, 0), &payload));
    assert_eq!(client.expect_disconnect(0), "normal");
}

#[test]
fn a_shutdown_disconnects_idle_clients_after_their_answers() {
    let listener = TestListener::open("");
    let mut client = listener.connect_and_handshake();
    client.send(&notify((1, 1), &[]));
    assert_eq!(client.frame().unwrap().ids, (1, 1));
    let server = listener.server;
    let stopping = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(server.shutdown(Duration::from_secs(20)))
    });
    assert_eq!(client.expect_disconnect(0), "normal");
    assert_eq!(stopping.join().unwrap(), 0, "no connection was dropped");
}

/// If a client pipelines its frames, each read may end in the middle of a frame, so the connection
/// may never be idle.
#[test]
fn a_shutdown_disconnects_a_client_after_its_answers_in_the_middle_of_a_frame() {
    let listener = TestListener::open("");
    let mut client = listener.connect_and_handshake();
    let request = notify((1, 1), &[]);
    let (start, end) = request.split_at(request.len() - 1);
    // The answer shows that the listener has also read the beginning of the next frame.
    client.send(&[&request, start].concat());
    assert_eq!(client.frame().unwrap().ids, (1, 1));
    // The only worker serves another client when this connection waits for the rest of the frame.
    let _other = listener.connect_and_handshake();
    let server = listener.server;
    let signal = server.shutdown_signal();
    let stopping = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(server.shutdown(Duration::from_secs(20)))
    });
    while !signal.has_begun() {
        std::thread::yield_now();
    }
    client.send(&[end, start].concat());
    assert_eq!(client.frame().unwrap().ids, (1, 1));
    assert_eq!(client.expect_disconnect(0), "normal");
    assert_eq!(stopping.join().unwrap(), 0, "no connection was dropped");
}
