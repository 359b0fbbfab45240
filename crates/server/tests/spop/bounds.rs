//! Tests of clients that use too much memory, are too slow, or disconnect.

use std::{io::ErrorKind, time::Duration};

use tidegate_net::Bounds;

use crate::haproxy::{Argument, NOTIFY, TestListener, frame, hello, notify};

/// A timeout that is short enough for a fast test, but long enough that no other test step times
/// out on a busy machine.
const SHORT: Duration = Duration::from_millis(500);

#[test]
fn a_frame_over_the_negotiated_length_ends_the_connection_before_it_is_read() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    client.send(&hello(256));
    client.frame().unwrap();
    // The client sends only the length of the frame.
    client.send(&257_u32.to_be_bytes());
    assert!(client.expect_disconnect(3).contains("max-frame-size"));
    let mut client = listener.connect();
    client.send(&u32::MAX.to_be_bytes());
    client.expect_disconnect(3);
    let mut client = listener.connect_and_handshake();
    let long = [b'x'; 16_000];
    let ack = client.notify(&[("unused", Argument::Text(&long))]);
    assert_eq!(ack.variables()["status"], "400", "an entry is too long");
}

#[test]
fn a_frame_with_a_wrong_inner_length_ends_only_its_connection() {
    let listener = TestListener::open("");
    let mut other = listener.connect_and_handshake();
    for payload in [
        &b"\x05che"[..],
        b"\x05check\x01",
        b"\x05check\x01\x02ip\x06\x7f",
        b"\x05check\x01\x02ip\x0f",
        b"\x05check\xff\x02ip\x00",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut client = listener.connect_and_handshake();
        client.send(&frame(NOTIFY, 1, (1, 1), payload));
        client.expect_disconnect(4);
    }
    let mut client = listener.connect_and_handshake();
    client.send(b"\0\0\0\x01\x03");
    client.expect_disconnect(4);
    assert_eq!(other.notify(&[]).variables()["allowed"], "true");
}

#[test]
fn a_silent_client_is_disconnected() {
    let listener = TestListener::with(
        "",
        Bounds {
            idle: SHORT,
            ..Bounds::default()
        },
    );
    assert!(listener.connect_and_handshake().frame().is_none());
    let listener = TestListener::with(
        "",
        Bounds {
            request: SHORT,
            ..Bounds::default()
        },
    );
    assert!(listener.connect().frame().is_none(), "without a hello");
    let mut client = listener.connect_and_handshake();
    let notify = notify((1, 1), &[]);
    client.send(&notify[..notify.len() - 1]);
    assert!(client.frame().is_none(), "a frame without its end");
}

#[test]
fn a_client_that_reads_nothing_is_disconnected() {
    let listener = TestListener::with(
        "",
        Bounds {
            write: SHORT,
            ..Bounds::default()
        },
    );
    let mut client = listener.connect_and_handshake();
    let requests = notify((1, 1), &[]).repeat(1_000);
    // The client does not read the responses, so the agent first stops reading and then closes the
    // connection. If the client's write timed out, the error would be `WouldBlock`.
    let error = client.send_until_closed(&requests);
    let is_closed = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error);
    assert!(is_closed, "{error:?}");
}

#[test]
fn a_client_that_half_closes_gets_its_answers() {
    let listener = TestListener::open("");
    let mut client = listener.connect_and_handshake();
    client.send(&notify((1, 1), &[]));
    client.half_close();
    assert_eq!(client.frame().unwrap().ids, (1, 1));
    assert!(client.frame().is_none());
}
