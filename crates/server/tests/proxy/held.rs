//! An upstream that responds when a test tells it to, with concurrent clients.

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

/// A timeout longer than any test step takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// An event of a request; requests are identified by number.
pub(crate) enum Event {
    /// The request has reached the upstream, which sends what it receives from this channel.
    Arrived(usize, Sender<&'static str>),
    Answered(usize, Answer),
}

/// The state of a request after it was sent.
pub(crate) enum Became {
    Held,
    Answered(Answer),
}

/// An upstream, and the requests that it has not answered yet.
pub(crate) struct Held {
    pub(crate) upstream: Upstream,
    pub(crate) events: Receiver<Event>,
    told: Sender<Event>,
    held: HashMap<usize, Sender<&'static str>>,
    /// Connected clients without a request in flight.
    idle: Vec<Client>,
    back: (Sender<Client>, Receiver<Client>),
    next: usize,
}

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

impl Held {
    pub(crate) fn start() -> Self {
        let (told, events) = channel();
        let tell = told.clone();
        let upstream = Upstream::start(move |talk| {
            while let Some(head) = talk.head() {
                let number = head
                    .lines()
                    .find_map(|line| line.strip_prefix("x-number: "));
                let (answer, answers) = channel();
                let _ = tell.send(Event::Arrived(number.unwrap().parse().unwrap(), answer));
                let Ok(answer) = answers.recv() else { return };
                talk.send(answer);
            }
        });
        Self {
            upstream,
            events,
            told,
            held: HashMap::new(),
            idle: Vec::new(),
            back: channel(),
            next: 0,
        }
    }

    /// Sends a request to `listener`. `request` is its beginning: method, path and headers. Waits until
    /// the upstream has received it or the client has a response.
    pub(crate) fn ask(&mut self, listener: &TestListener, request: &str) -> (usize, Became) {
        let number = self.next;
        self.next += 1;
        self.idle.extend(self.back.1.try_iter());
        let mut client = self.idle.pop().unwrap_or_else(|| listener.connect());
        client.send(format!("{request}x-number: {number}\r\nhost: h\r\n\r\n"));
        let (told, back) = (self.told.clone(), self.back.0.clone());
        spawn(move || {
            let answer = client.read_answer(false);
            let _ = back.send(client);
            let _ = told.send(Event::Answered(number, answer));
        });
        match self.events.recv_timeout(PATIENCE).unwrap() {
            Event::Arrived(arrived, answer) => {
                assert_eq!(arrived, number);
                self.held.insert(number, answer);
                (number, Became::Held)
            }
            Event::Answered(answered, answer) => {
                assert_eq!(answered, number);
                (number, Became::Answered(answer))
            }
        }
    }

    /// Returns the status of the response to `request`. If it reaches the upstream, the upstream
    /// answers with 200 after `takes`.
    pub(crate) fn status(&mut self, listener: &TestListener, request: &str, takes: Span) -> u16 {
        match self.ask(listener, request) {
            (_, Became::Answered(answer)) => answer.status,
            (number, Became::Held) => {
                let clock = listener.limiter.clock();
                clock.set(clock.now().after(takes));
                self.release(number).status
            }
        }
    }

    /// Lets the upstream answer, and waits until the client has the response.
    pub(crate) fn release(&mut self, number: usize) -> Answer {
        self.held.remove(&number).unwrap().send(OK).unwrap();
        match self.events.recv_timeout(PATIENCE).unwrap() {
            Event::Answered(answered, answer) => {
                assert_eq!(answered, number);
                answer
            }
            Event::Arrived(..) => panic!("nobody asked"),
        }
    }
}
