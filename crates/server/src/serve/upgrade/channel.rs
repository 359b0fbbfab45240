//! The messages between the two processes of an upgrade.
//!
//! ```text
//!   old process                                                new process
//!     hello: version ───────────────────────────────────────────▶ checks the version
//!     listener: name, socket ───────────────────────────────────▶ reads the configuration,
//!     start ────────────────────────────────────────────────────▶ binds, loads, connects
//!        ◀───────────────────────────────────────────────────── prepared, or failed: reason
//!     stops accepting
//!     connection: socket, state ────────────────────────────────▶ keeps them
//!     state: counters, overrides, … ────────────────────────────▶ restores it
//!     end ──────────────────────────────────────────────────────▶
//!        ◀───────────────────────────────────────────── restored, or failed: reason
//!     commit ───────────────────────────────────────────────────▶ accepts and decides
//!     connection: socket, state ────────────────────────────────▶ serves it
//! ```
//!
//! A message has a header of 8 bytes: `Tg`, its kind, 0, and the length of its body as a
//! little-endian number of 4 bytes. A socket travels with the header (`SCM_RIGHTS`). The framing
//! and the first message are the same in every version, so that every version can report that it
//! does not know another version.

use std::{
    io::{self, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use rustix::{
    io::retry_on_intr,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use tidegate_net::MAX_STATE_BYTES;

/// The version of the messages. A process refuses messages of another version.
pub(super) const VERSION: u32 = 2;

/// The maximum length of the body of a small message.
const MAX_SMALL_BYTES: usize = 64 << 10;

/// The maximum length of a record of the state: a part of the memory store, of which there are up
/// to 256.
const MAX_RECORD_BYTES: usize = 1 << 30;

const MAGIC: [u8; 2] = *b"Tg";
const HEADER_BYTES: usize = 8;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Hello = 1,
    Listener = 2,
    Start = 3,
    Prepared = 4,
    Failed = 5,
    Connection = 6,
    State = 7,
    End = 8,
    Restored = 9,
    Commit = 10,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Hello,
        Self::Listener,
        Self::Start,
        Self::Prepared,
        Self::Failed,
        Self::Connection,
        Self::State,
        Self::End,
        Self::Restored,
        Self::Commit,
    ];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }

    const fn max_bytes(self) -> usize {
        match self {
            Self::State => MAX_RECORD_BYTES,
            // The name in a client's certificate is shorter than the certificate, which fits into a
            // handshake message of 64 KiB.
            Self::Connection => MAX_STATE_BYTES + 2 * MAX_SMALL_BYTES,
            _ => MAX_SMALL_BYTES,
        }
    }
}

/// A received message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
    pub(super) socket: Option<OwnedFd>,
}

/// The reason why no message was received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other process has ended.
    #[error("the other process has closed the connection")]
    Closed,
    /// The other process sent nothing in time.
    #[error("the other process sent nothing for {0:?}")]
    TimedOut(Duration),
    /// The bytes are not a message.
    #[error("received bytes that are not a message of an upgrade: {0}")]
    NotAMessage(&'static str),
    /// The message is not expected now.
    #[error("received an unexpected message of kind {0}")]
    Unexpected(u8),
    /// The operating system reported an error.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// One end of the connection between the two processes.
#[derive(Debug)]
pub(super) struct Channel {
    socket: UnixStream,
    timeout: Duration,
}

impl Channel {
    pub(super) fn new(socket: UnixStream, timeout: Duration) -> io::Result<Self> {
        let mut channel = Self { socket, timeout };
        channel.set_timeout(Some(timeout))?;
        Ok(channel)
    }

    /// Sets the maximum time for each read and each write; `None` means no maximum.
    pub(super) fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout.unwrap_or(Duration::MAX);
        self.socket.set_read_timeout(timeout)?;
        self.socket.set_write_timeout(timeout)
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            socket: self.socket.try_clone()?,
            timeout: self.timeout,
        })
    }

    /// Sends a message, whose body consists of `parts`.
    pub(super) fn send(
        &self,
        kind: Kind,
        parts: &[&[u8]],
        socket: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let sent = self.send_message(kind, parts, socket);
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                let problem = format!("the other process read nothing for {:?}", self.timeout);
                io::Error::new(io::ErrorKind::TimedOut, problem)
            }
            _ => error,
        })
    }

    fn send_message(
        &self,
        kind: Kind,
        parts: &[&[u8]],
        socket: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        if length > kind.max_bytes() {
            let problem = format!("a message of {length} bytes is too long");
            return Err(io::Error::other(problem));
        }
        let mut header = [MAGIC[0], MAGIC[1], kind as u8, 0, 0, 0, 0, 0];
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        header[4..].copy_from_slice(&length.to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sockets = socket.as_slice();
        if !sockets.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(sockets));
        }
        let bytes = [IoSlice::new(&header)];
        // A signal may interrupt the call.
        let sent = retry_on_intr(|| {
            let socket = self.socket.as_fd();
            sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)
        })?;
        let mut stream = &self.socket;
        stream.write_all(&header[sent..])?;
        parts.iter().try_for_each(|part| stream.write_all(part))
    }

    /// Receives the next message.
    pub(super) fn receive(&self) -> Result<Message, ChannelError> {
        let received = self.receive_message();
        received.map_err(|error| match error {
            ChannelError::System(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ChannelError::TimedOut(self.timeout)
            }
            error => error,
        })
    }

    fn receive_message(&self) -> Result<Message, ChannelError> {
        let (header, socket) = self.receive_header()?;
        let [magic @ .., kind, 0, l0, l1, l2, l3] = header else {
            return Err(ChannelError::NotAMessage("the header is invalid"));
        };
        if magic != MAGIC {
            return Err(ChannelError::NotAMessage("the header is invalid"));
        }
        let kind = Kind::of(kind).ok_or(ChannelError::Unexpected(kind))?;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > kind.max_bytes() {
            return Err(ChannelError::NotAMessage("it is too long"));
        }
        let mut body = Vec::new();
        // The memory grows only with the bytes that arrive.
        let read = (&self.socket)
            .take(u64::from(u32::try_from(length).unwrap_or(u32::MAX)))
            .read_to_end(&mut body)?;
        if read < length {
            return Err(ChannelError::Closed);
        }
        Ok(Message { kind, body, socket })
    }

    /// Receives a header, and the socket that travels with it.
    fn receive_header(&self) -> Result<([u8; HEADER_BYTES], Option<OwnedFd>), ChannelError> {
        let (mut header, mut count) = ([0; HEADER_BYTES], 0);
        let mut socket = None;
        while count < HEADER_BYTES {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = retry_on_intr(|| {
                let mut rest = [IoSliceMut::new(&mut header[count..])];
                let socket = self.socket.as_fd();
                recvmsg(socket, &mut rest, &mut control, RecvFlags::CMSG_CLOEXEC)
            })
            .map_err(io::Error::from)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(sockets) = message {
                    for received in sockets {
                        if socket.replace(received).is_some() {
                            let problem = "more than one socket";
                            return Err(ChannelError::NotAMessage(problem));
                        }
                    }
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(ChannelError::NotAMessage("too many sockets"));
            }
            if received.bytes == 0 {
                return Err(ChannelError::Closed);
            }
            count += received.bytes;
        }
        Ok((header, socket))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let channel = |socket| Channel::new(socket, Duration::from_secs(10)).unwrap();
        (channel(ours), channel(theirs))
    }

    #[test]
    fn a_message_arrives_with_its_socket() {
        let (ours, theirs) = pair();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        ours.send(Kind::Listener, &[b"ht", b"tp"], Some(listener.as_fd()))
            .unwrap();
        ours.send(Kind::Start, &[], None).unwrap();
        let first = theirs.receive().unwrap();
        assert_eq!(
            (first.kind, &first.body[..]),
            (Kind::Listener, &b"http"[..])
        );
        let received = TcpListener::from(first.socket.unwrap());
        assert_eq!(received.local_addr().unwrap(), address);
        let second = theirs.receive().unwrap();
        assert_eq!((second.kind, second.socket.is_none()), (Kind::Start, true));
        drop(ours);
        assert!(matches!(theirs.receive(), Err(ChannelError::Closed)));
    }

    #[test]
    fn bytes_that_are_not_a_message_are_refused() {
        for (bytes, said) in [
            (
                &b"GET / HTTP/1.1\r\n\r\n"[..],
                "not a message of an upgrade",
            ),
            (b"Tg\x01\x01\0\0\0\0", "the header is invalid"),
            (b"Tg\x63\0\0\0\0\0", "message of kind 99"),
            (b"Tg\x01\0\xff\xff\xff\xff", "it is too long"),
            (b"Tg\x07\0\xff\xff\xff\xff", "it is too long"),
            (b"Tg\x01\0\x04\0\0\0abc", "has closed the connection"),
            (b"Tg\x01", "has closed the connection"),
            (b"", "has closed the connection"),
        ] {
            let (ours, theirs) = pair();
            (&ours.socket).write_all(bytes).unwrap();
            drop(ours);
            let error = theirs.receive().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_silent_process_is_not_waited_for_without_end() {
        let (ours, mut theirs) = pair();
        theirs.set_timeout(Some(Duration::from_millis(10))).unwrap();
        let error = theirs.receive().unwrap_err().to_string();
        assert!(error.contains("sent nothing for 10ms"), "{error}");
        drop(ours);
    }

    #[test]
    fn a_send_to_a_process_that_does_not_read_times_out() {
        let (mut ours, theirs) = pair();
        ours.set_timeout(Some(Duration::from_millis(10))).unwrap();
        let more_than_fits = vec![0; 4 << 20];
        let sent = ours.send(Kind::State, &[&more_than_fits], None);
        let error = sent.unwrap_err().to_string();
        assert_eq!(error, "the other process read nothing for 10ms");
        drop(theirs);
    }

    #[test]
    fn a_message_with_several_sockets_is_refused() {
        let (ours, theirs) = pair();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = [listener.as_fd(); 2];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&sockets)));
        let header = b"Tg\x02\0\0\0\0\0";
        sendmsg(
            ours.socket.as_fd(),
            &[IoSlice::new(header)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .unwrap();
        let error = theirs.receive().unwrap_err().to_string();
        assert!(error.contains("more than one socket"), "{error}");
    }
}
