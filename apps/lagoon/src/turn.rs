//! Fair order of a loop's inputs: network frames go first, and everything else after [`TURN_MAX`] of them, so that peers' frames do not
//! starve ticks, reports and inputs.

/// Things that happen before the other side goes first.
const TURN_MAX: u32 = 64;

/// Whose turn it is, and a frame that waits for an event ahead of it.
#[derive(Debug)]
pub(crate) struct Turn<T> {
    taken: u32,
    /// And how many events are still ahead of it.
    held: Option<(T, usize)>,
}

impl<T> Default for Turn<T> {
    fn default() -> Self {
        Self { taken: 0, held: None }
    }
}

impl<T> Turn<T> {
    /// Counts an input. Returns whether inputs other than the network's go first.
    pub(crate) fn advance(&mut self) -> bool {
        self.taken = (self.taken + 1) % (2 * TURN_MAX);
        self.taken >= TURN_MAX
    }

    /// Nothing else waits: the network goes first.
    pub(crate) fn network(&mut self) {
        self.taken = 0;
    }

    /// The frame that waits, if any; it is next, after [`Turn::in_order`].
    pub(crate) fn held(&mut self) -> Option<(T, usize)> {
        self.held.take()
    }

    /// `frame`, or a waiting event that goes ahead of it, as a frame may have overtaken the announcement of its session. Every event
    /// is an input that counts.
    pub(crate) fn in_order(&mut self, frame: T, waiting: usize, event: impl FnOnce() -> Option<T>) -> T {
        match waiting.checked_sub(1).zip(event()) {
            Some((left, event)) => {
                self.held = Some((frame, left));
                event
            }
            None => frame,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Input {
        Event(u32),
        Frame,
        Other,
    }

    /// One frame handled all waiting events at once, as many as an inbox has.
    #[test]
    fn a_frame_that_overtook_its_session_keeps_nobody_waiting() {
        const EVENTS: u32 = 1000;
        let (mut turn, mut waiting, mut happened) = (Turn::default(), 1.., Vec::new());
        while happened.last() != Some(&Input::Frame) {
            if turn.advance() {
                turn.network();
                happened.push(Input::Other);
                continue;
            }
            let (frame, left) = turn.held().unwrap_or((Input::Frame, EVENTS as usize));
            happened.push(turn.in_order(frame, left, || waiting.next().map(Input::Event)));
        }
        let events: Vec<Input> = happened.iter().copied().filter(|input| matches!(input, Input::Event(_))).collect();
        assert_eq!(events, (1..=EVENTS).map(Input::Event).collect::<Vec<_>>(), "in order, and all ahead of the frame");
        let turns: Vec<&[Input]> = happened.split(|input| *input == Input::Other).collect();
        assert!(turns.len() > 10 && turns.iter().all(|turn| turn.len() <= TURN_MAX as usize));
    }
}
