//! An upstream that answers when a test says so, and clients beside each other that ask it.

use std::{
    collections::HashMap,
    sync::mpsc::{Receiver, Sender, channel},
    thread::spawn,
    time::Duration,
};

use tidegate_core::Span;

use crate::{
    client::{Answer, Client},
    door::Door,
    upstream::Upstream,
};

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// What happens to a request, by its number.
pub(crate) enum Event {
    /// It has reached the upstream, which sends what comes from here.
    Arrived(usize, Sender<&'static str>),
    Answered(usize, Answer),
}

/// What became of a request that was just sent.
pub(crate) enum Became {
    Held,
    Answered(Answer),
}

/// An upstream, and what it holds.
pub(crate) struct Held {
    pub(crate) upstream: Upstream,
    pub(crate) events: Receiver<Event>,
    told: Sender<Event>,
    held: HashMap<usize, Sender<&'static str>>,
    /// Clients that have nothing to do.
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

    /// Asks `door`, as `request` begins: a method, a path and headers. Waits until the upstream has it, or there is an answer.
    pub(crate) fn ask(&mut self, door: &Door, request: &str) -> (usize, Became) {
        let number = self.next;
        self.next += 1;
        self.idle.extend(self.back.1.try_iter());
        let mut client = self.idle.pop().unwrap_or_else(|| door.connect());
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

    /// The status of the answer to `request`, which the upstream answers with 200 after `takes`, if it gets it.
    pub(crate) fn status(&mut self, door: &Door, request: &str, takes: Span) -> u16 {
        match self.ask(door, request) {
            (_, Became::Answered(answer)) => answer.status,
            (number, Became::Held) => {
                let clock = door.limiter.clock();
                clock.set(clock.now().after(takes));
                self.release(number).status
            }
        }
    }

    /// Has the upstream answer, and waits until the client has that.
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
