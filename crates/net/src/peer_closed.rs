//! Detects that the peer has closed a connection from which no protocol code is currently reading.

use std::{
    pin::pin,
    task::{Context, Poll},
};

use tokio::{
    io::{DuplexStream, Interest, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

/// A stream that can detect whether the peer has closed or half-closed the connection.
pub trait PeerClosed {
    /// Returns ready if the peer has closed the connection. Reads nothing. No other task may read
    /// from the stream at the same time.
    ///
    /// If the peer has sent bytes that are still unread, the task may not be woken when the peer
    /// closes the connection. The caller should therefore poll again after a while.
    fn poll_peer_closed(&self, cx: &mut Context<'_>) -> Poll<()>;
}

impl PeerClosed for TcpStream {
    fn poll_peer_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut byte = [0; 1];
        match self.poll_peek(cx, &mut ReadBuf::new(&mut byte)) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(()),
            // The stream has unread bytes, such as the next pipelined request.
            Poll::Ready(Ok(_)) => match pin!(self.ready(Interest::READABLE)).poll(cx) {
                Poll::Ready(Ok(ready)) if !ready.is_read_closed() => Poll::Pending,
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl PeerClosed for TlsStream<TcpStream> {
    fn poll_peer_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.get_ref().0.poll_peer_closed(cx)
    }
}

/// A tokio in-process pipe cannot detect that its peer has closed it.
impl PeerClosed for DuplexStream {
    fn poll_peer_closed(&self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
