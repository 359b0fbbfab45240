//! Tests of small messages on one HTTP/2 stream, as in gRPC streaming. The client writes individual
//! frames, so that the tests determine the number of control frames.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::{
    http2_smuggling::{DATA, END_HEADERS, HEADERS, SETTINGS, block, frame, post},
    listener::TestListener,
    upstream::Upstream,
};

const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;

const MESSAGE: &[u8] = &[b'm'; 100];

/// Reads up to the next message. Frames of other types are skipped.
fn read_message(stream: &mut TcpStream) -> Vec<u8> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).unwrap();
        if head[3] == DATA && !payload.is_empty() {
            return payload;
        }
    }
}

/// Some clients, such as grpc-go, send window updates for the stream and the connection after each
/// message that they read, and measure the bandwidth with a `PING`.
#[test]
fn a_stream_of_small_messages_is_not_a_flood() {
    let upstream = Upstream::start(|connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        // The upstream returns each message as soon as it has arrived.
        while connection.line().is_some_and(|size| size == "64\r\n") {
            let message = connection.read_bytes(MESSAGE.len() + 2);
            connection.send([b"64\r\n", &*message].concat());
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut stream = TcpStream::connect(listener.listener.local_addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    let timeout = Some(Duration::from_secs(30));
    stream.set_read_timeout(timeout).unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frame(HEADERS, END_HEADERS, 1, &block(&post(&[]))));
    stream.write_all(&bytes).unwrap();
    let open = u32::try_from(MESSAGE.len()).unwrap().to_be_bytes();
    let exchange = [
        frame(DATA, 0, 1, MESSAGE),
        frame(WINDOW_UPDATE, 0, 1, &open),
        frame(WINDOW_UPDATE, 0, 0, &open),
        frame(PING, 0, 0, b"sentinel"),
    ]
    .concat();
    for number in 0..2_000 {
        stream.write_all(&exchange).unwrap();
        assert_eq!(read_message(&mut stream), MESSAGE, "{number}");
    }
    assert_eq!(listener.listener.floods(), 0);
}
