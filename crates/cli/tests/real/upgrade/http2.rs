//! A client that writes and reads single HTTP/2 frames, to call a gRPC method without a message.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

const TIMEOUT: Duration = Duration::from_secs(30);

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
const PING: u8 = 6;

/// The message of a call without parameters: not compressed, and empty.
const EMPTY_MESSAGE: &[u8] = &[0; 5];

/// A received frame.
struct Frame {
    kind: u8,
    flags: u8,
    payload: Vec<u8>,
}

/// A connection to the gRPC listener.
pub(super) struct Http2Client<S = TcpStream> {
    stream: S,
    has_received_goaway: bool,
}

impl Http2Client {
    /// Connects, and exchanges the settings.
    pub(super) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut client = Self::begin(stream);
        client.read_until(|frame| frame.kind == SETTINGS && frame.flags & ACK > 0);
        client
    }
}

impl<S: Read + Write> Http2Client<S> {
    /// Sends the beginning of a connection, and does not wait for the settings of the server.
    pub(super) fn begin(stream: S) -> Self {
        let mut client = Self {
            stream,
            has_received_goaway: false,
        };
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        client.stream.write_all(preface).unwrap();
        client.send(SETTINGS, 0, 0, &[]);
        client
    }

    /// Begins a health check (`grpc.health.v1.Health/Check`) on the first stream.
    pub(super) fn begin_health_check(&mut self) {
        // Literal header fields without indexing (RFC 7541 §6.2.2). The first byte of a pair is the
        // index of the name in the static table.
        let mut block = vec![0x83, 0x86]; // :method POST, :scheme http
        let path = "/grpc.health.v1.Health/Check";
        let fields: [(&[u8], &str); 3] = [
            (&[0x04], path),
            (&[0x01], "localhost"),
            (&[0x0f, 0x10], "application/grpc"),
        ];
        for (name, value) in fields {
            block.extend(name);
            block.push(u8::try_from(value.len()).unwrap());
            block.extend(value.as_bytes());
        }
        self.send(HEADERS, END_HEADERS, 1, &block);
    }

    /// Sends the message of the health check, and waits for the end of the response. Returns the
    /// message that was received.
    pub(super) fn end_health_check(&mut self) -> Vec<u8> {
        self.send(DATA, END_STREAM, 1, EMPTY_MESSAGE);
        let mut received = Vec::new();
        self.read_until(|frame| {
            if frame.kind == DATA {
                received.extend(&frame.payload);
            }
            matches!(frame.kind, DATA | HEADERS) && frame.flags & END_STREAM > 0
        });
        received
    }

    /// Reads until the server has sent a `GOAWAY` frame.
    pub(super) fn wait_for_goaway(&mut self) {
        if !self.has_received_goaway {
            self.read_until(|frame| frame.kind == GOAWAY);
        }
    }

    /// Reads until the server closes the connection. Panics on an I/O error. Returns whether the
    /// server has sent a `GOAWAY` frame.
    pub(super) fn read_until_closed(mut self) -> bool {
        while self.read().is_some() {}
        self.has_received_goaway
    }

    fn read_until(&mut self, mut is_last: impl FnMut(&Frame) -> bool) {
        while !is_last(&self.read().expect("the connection is open")) {}
    }

    /// Reads a frame; `None` if the server has closed the connection. Replies to a `PING`.
    fn read(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        if self.stream.read(&mut head[..1]).unwrap() == 0 {
            return None;
        }
        self.stream.read_exact(&mut head[1..]).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.stream.read_exact(&mut payload).unwrap();
        let (kind, flags) = (head[3], head[4]);
        if kind == PING && flags & ACK == 0 {
            self.send(PING, ACK, 0, &payload);
        }
        self.has_received_goaway |= kind == GOAWAY;
        Some(Frame {
            kind,
            flags,
            payload,
        })
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        self.stream.write_all(&[&head, payload].concat()).unwrap();
    }
}
