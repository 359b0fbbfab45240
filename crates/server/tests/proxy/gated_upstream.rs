//! An upstream whose responses are controlled by the test, and concurrent clients.

use std::{
    collections::HashMap,
    sync::mpsc::{Receiver, Sender, channel},
    thread::spawn,
    time::Duration,
};

use tidegate_core::Span;

use crate::{
    client::{Answer, Client},
    listener::TestListener,
    upstream::Upstream,
};

/// A timeout that is longer than any test step takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An event in the life of a request. The number identifies the request.
pub(crate) enum Event {
    /// The request has reached the upstream. The upstream responds with the string that is sent on
    /// this channel.
    Arrived(usize, Sender<&'static str>),
    Responded(usize, Answer),
}

/// The state of a request after it has been sent.
pub(crate) enum RequestState {
    Pending,
    Responded(Answer),
}

/// An upstream, and its unanswered requests.
pub(crate) struct GatedUpstream {
    pub(crate) upstream: Upstream,
    pub(crate) events: Receiver<Event>,
    event_sender: Sender<Event>,
    pending: HashMap<usize, Sender<&'static str>>,
    /// Connected clients without a request in flight.
    idle: Vec<Client>,
    returned_clients: (Sender<Client>, Receiver<Client>),
    next: usize,
}

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

impl GatedUpstream {
    pub(crate) fn start() -> Self {
        let (event_sender, events) = channel();
        let arrivals = event_sender.clone();
        let upstream = Upstream::start(move |connection| {
            while let Some(head) = connection.head() {
                let number = head
                    .lines()
                    .find_map(|line| line.strip_prefix("x-number: "));
                let (answer, answers) = channel();
                let _ = arrivals.send(Event::Arrived(number.unwrap().parse().unwrap(), answer));
                let Ok(answer) = answers.recv() else { return };
                connection.send(answer);
            }
        });
        Self {
            upstream,
            events,
            event_sender,
            pending: HashMap::new(),
            idle: Vec::new(),
            returned_clients: channel(),
            next: 0,
        }
    }

    /// Sends a request to `listener`. `request` is the beginning of the request: method, path and
    /// headers. Returns once the upstream has received the request or the client has a response.
    pub(crate) fn ask(&mut self, listener: &TestListener, request: &str) -> (usize, RequestState) {
        let number = self.next;
        self.next += 1;
        self.idle.extend(self.returned_clients.1.try_iter());
        let mut client = self.idle.pop().unwrap_or_else(|| listener.connect());
        client.send(format!("{request}x-number: {number}\r\nhost: h\r\n\r\n"));
        let (event_sender, returned_clients) =
            (self.event_sender.clone(), self.returned_clients.0.clone());
        spawn(move || {
            let answer = client.read_answer(false);
            let _ = returned_clients.send(client);
            let _ = event_sender.send(Event::Responded(number, answer));
        });
        match self.events.recv_timeout(TIMEOUT).unwrap() {
            Event::Arrived(arrived, answer) => {
                assert_eq!(arrived, number);
                self.pending.insert(number, answer);
                (number, RequestState::Pending)
            }
            Event::Responded(answered, answer) => {
                assert_eq!(answered, number);
                (number, RequestState::Responded(answer))
            }
        }
    }

    /// Returns the status of the response to `request`. If the request reaches the upstream, the
    /// upstream answers with 200 after `latency`.
    pub(crate) fn status(&mut self, listener: &TestListener, request: &str, latency: Span) -> u16 {
        match self.ask(listener, request) {
            (_, RequestState::Responded(answer)) => answer.status,
            (number, RequestState::Pending) => {
                let clock = listener.limiter.clock();
                clock.set(clock.now().after(latency));
                self.release(number).status
            }
        }
    }

    /// Lets the upstream answer a request, and waits until the client has the response.
    pub(crate) fn release(&mut self, number: usize) -> Answer {
        self.pending.remove(&number).unwrap().send(OK).unwrap();
        match self.events.recv_timeout(TIMEOUT).unwrap() {
            Event::Responded(answered, answer) => {
                assert_eq!(answered, number);
                answer
            }
            Event::Arrived(..) => panic!("nobody asked"),
        }
    }
}
