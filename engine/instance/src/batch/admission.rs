//! Admission: which requests are accepted, and memory for those that wait, all or nothing.
//!
//! A prompt is planned whole: its oldest rBlocks go to creditors, its newest stay here, so that decoding grows in local
//! memory. What cannot be placed waits, holding nothing.

use super::policy;
use super::sequence::{Need, Sequence};
use crate::instance::Instance;
use crate::membership::Lending;
use lagoon_protocol::Role;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, GMANAGER_WAIT_MS, QUEUE_DEFAULT};
use lagoon_types::{GenerateRequest, RequestError, SeqId};

impl Instance {
    /// Whether it is one of those that take clients' requests.
    fn takes_requests(&self) -> Result<(), RequestError> {
        if self.membership.roles.accepts(self.cx.now_ms) {
            return Ok(());
        }
        // Clients of one whose role changed ask another one.
        let why = match self.membership.roles.now() {
            Role::Kv => "this node lends memory only (--role kv)",
            Role::Prefill if self.cx.config.role == Role::Prefill => {
                "this instance computes prompts for decode workers only (--role prefill)"
            }
            _ => {
                let why = "this instance changes or has changed its role, and takes no requests any more";
                return Err(RequestError::Unavailable(why.to_owned()));
            }
        };
        Err(RequestError::Invalid(why.to_owned()))
    }

    pub(crate) fn accept(&mut self, seq: SeqId, mut request: GenerateRequest) -> Result<(), RequestError> {
        self.takes_requests()?;
        if self.membership.drained {
            return Err(RequestError::Unavailable("this instance was drained and stops".to_owned()));
        }
        if request.prompt.is_empty() || request.max_tokens == 0 {
            return Err(RequestError::Invalid(
                "a request needs a prompt and at least one token to generate".to_owned(),
            ));
        }
        if let Some(id) = request.prompt.iter().find(|id| **id >= self.cx.config.vocab) {
            return Err(RequestError::Invalid(format!(
                "token id {id} is not in the vocabulary of {} tokens",
                self.cx.config.vocab
            )));
        }
        if request.answered as usize >= request.prompt.len() || request.answered >= request.max_tokens {
            let GenerateRequest { answered, max_tokens, .. } = request;
            return Err(RequestError::Invalid(format!(
                "an answer of {max_tokens} tokens cannot go on after {answered}, or has no prompt"
            )));
        }
        let known_tokens = request.prompt.len() as u64;
        let prompt_tokens = known_tokens - u64::from(request.answered);
        let too_long = |needed_tokens, limit_tokens, limit_name| RequestError::TooLong {
            prompt_tokens,
            needed_tokens,
            limit_tokens,
            limit_name,
        };
        let (positions, pool) = (u64::from(self.cx.config.max_positions), self.pool_tokens());
        if prompt_tokens + u64::from(request.max_tokens) > positions {
            let needed = prompt_tokens + u64::from(request.max_tokens);
            return Err(too_long(needed, positions, "the model's context"));
        }
        // Under a window only the window is held, but a prompt is planned whole: the bound is the same.
        if known_tokens + 1 > pool {
            return Err(too_long(known_tokens + 1, pool, "the KV capacity of the whole pool"));
        }
        // What the pool cannot hold is not generated: the answer ends for its length. A window that fits is always held.
        let held = self.cx.config.window.map(|w| u64::from(w) + 2 * u64::from(self.cx.config.block_tokens));
        if held.is_none_or(|held| held > pool) {
            let room = u32::try_from(pool - prompt_tokens).unwrap_or(u32::MAX);
            request.max_tokens = request.max_tokens.min(room);
        }
        let tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let full = |limit| RequestError::QueueFull { queued: limit, limit };
        let away = self.sends_away();
        if !away {
            self.batch.enqueue(seq, tokens, self.cx.now_ms).map_err(|queue| full(queue.limit))?;
        } else if self.waiting() >= self.cx.config.sched.queue {
            return Err(full(self.cx.config.sched.queue));
        }
        self.batch.add(seq, Sequence::new(seq, request, self.cx.config.block_tokens, self.cx.now_ms));
        if away {
            self.send_away(seq);
        }
        Ok(())
    }

    /// Requests that wait to be admitted, or for their prompts.
    pub(crate) fn waiting(&self) -> usize {
        self.batch.sched.waiting().len() + self.prefill.away()
    }

    /// Admits whatever there is memory for.
    pub(crate) fn admit(&mut self) {
        self.admit_in_turn();
        self.admit_pushed();
    }

    /// A prompt for which its asker keeps memory waits for this instance's memory only: not behind a head that waits for
    /// others' (it may be the asker's), and not for an oldest waiting request (the asker keeps nothing for what is younger).
    fn admit_pushed(&mut self) {
        let head = self.batch.sched.next_waiting().and_then(|head| self.batch.seqs.get(&head.seq));
        let elsewhere = |s: &Sequence| s.blocks.shortfall(s.len() + 1) > self.cx.config.blocks_total;
        if !head.is_some_and(|head| elsewhere(head) || self.gives_way(head.since_ms)) {
            return;
        }
        let pushed = self.batch.sched.waiting().map(|w| w.seq).filter(|seq| self.prefill.is_pushed(*seq));
        let pushed: Vec<SeqId> = pushed.collect();
        for id in pushed {
            let full = self.batch.sched.running_len() >= self.cx.config.sched.running;
            let room = self.room() + self.shareable(id);
            let fits = |s: &Sequence| s.blocks.shortfall(s.len()) <= room;
            if !full && self.batch.seqs.get(&id).is_some_and(fits) && self.place(id) {
                self.admit_placed();
            }
        }
    }

    /// Admits from the head of the queue for as long as there is memory.
    fn admit_in_turn(&mut self) {
        self.admit_placed();
        while let Some(head) = self.batch.sched.next_waiting() {
            let Some(seq) = self.batch.seqs.get(&head.seq) else { return };
            if self.gives_way(seq.since_ms) {
                return;
            }
            let (need, needed) = (seq.need(), seq.blocks.shortfall(seq.len() + 1));
            match need.expect("what waits is in the queue") {
                Need::Borrowing(_) => return,
                Need::RetryAt(at) if at > self.cx.now_ms && needed > self.room() + self.shareable(head.seq) => {
                    self.batch.due.wake_at(at);
                    return;
                }
                Need::Met | Need::RetryAt(_) => {}
            }
            if !self.place(head.seq) {
                return;
            }
            self.admit_placed();
        }
    }

    /// Waiting sequences that have all their memory join the batch, wherever they stand in the queue: they would
    /// otherwise hold memory that the head waits for.
    pub(crate) fn admit_placed(&mut self) {
        let placed = |s: &SeqId| self.batch.seqs.get(s).is_some_and(|s| s.is_placed() && s.blocks.blocks() > 0);
        let placed: Vec<SeqId> = self.batch.sched.waiting().map(|w| w.seq).filter(placed).collect();
        for seq in placed {
            if self.batch.sched.running_len() >= self.cx.config.sched.running {
                return;
            }
            let micro_batch = self.batch.micro_batch_of(seq);
            let known = self.batch.seqs.get(&seq).map_or(0, |s| s.blocks.written());
            self.batch.admit(seq, micro_batch, known);
            self.note_admitted(seq);
        }
    }

    /// rBlocks that are kept free for the growth of what runs.
    pub(crate) fn growth_reserve(&self) -> u32 {
        policy::growth_reserve(self.batch.sched.running_len(), self.cx.config.blocks_total)
    }

    /// Blocks for what is to be admitted, or to come home.
    pub(crate) fn room(&self) -> u32 {
        self.cx.memory.rm.available().saturating_sub(self.growth_reserve())
    }

    /// Whether what came at `since_ms` waits until the oldest waiting pool-sized request has its memory.
    pub(crate) fn gives_way(&self, since_ms: u64) -> bool {
        policy::gives_way(since_ms, self.membership.oldest_waiting(self.cx.now_ms), self.membership.id)
    }

    /// Tells the rManager who waits for memory here, and in the pool.
    pub(crate) fn tell_waiting(&mut self) {
        if let Some(until_ms) = self.membership.oldest_waiting_until_ms(self.cx.now_ms) {
            self.batch.due.wake_at(until_ms);
        }
        self.cx.memory.rm.set_waiting(self.waiting_since_ms(), self.membership.oldest_waiting(self.cx.now_ms));
    }

    /// Since when the head of the queue waits for memory that this instance has by itself, if it does.
    pub(crate) fn waiting_since_ms(&self) -> Option<u64> {
        let head = self.batch.seqs.get(&self.batch.sched.next_waiting()?.seq)?;
        let needed = head.blocks.shortfall(head.len() + 1);
        (needed <= self.cx.config.blocks_total).then_some(head.since_ms)
    }

    /// Finds memory for a whole waiting sequence. True if it has it now; false if it negotiates or must retry.
    fn place(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.batch.seqs.get(&id) else { return false };
        let since_ms = seq.since_ms;
        // One token more than is known: the next one must have a place. What is computed for others ends before it, and
        // lies here as a whole.
        let job = self.prefill.is_job(id);
        let needed = seq.blocks.shortfall(seq.len() + u32::from(!job));
        let end = seq.blocks.blocks() + needed;
        // Under a window a sequence may grow longer than the pool; once it is preempted, no memory is enough for it. It
        // must not hold up what waits behind it for longer than an instance may need to come back.
        let capacity = self.membership.pool_blocks_total.max(u64::from(self.cx.config.blocks_total));
        if policy::is_outgrown(needed, capacity, seq.misses) {
            self.fail_outgrown(id, capacity);
            return false;
        }
        // What others have of it needs no memory, unless its oldest blocks are to be elsewhere.
        let room = self.room();
        let here = needed <= room || needed <= room + self.shareable(id);
        let local = if here { needed } else { needed.min(room) };
        if local < needed && job {
            self.retry_later(id);
            return false;
        }
        self.membership.need_gmanager(self.cx.now_ms);
        let lending = self.membership.lending(self.cx.now_ms);
        if local < needed && lending != Lending::Open {
            self.wait_for_gmanager(id, lending, needed);
            return false;
        }
        let (known, after) = if local == needed { self.adopt_prefix(id) } else { (0, None) };
        // The newest blocks stay here; the table is built oldest first, so they wait aside while it borrows.
        let Some(blocks) = self.cx.memory.rm.allocate(id, end - local + known..end, after) else {
            self.release_memory(id);
            self.retry_later(id);
            return false;
        };
        let borrow =
            (local < needed).then(|| self.cx.memory.rm.borrow_to_admit(id, needed - local, since_ms, self.cx.now_ms));
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return false };
        match borrow {
            None => {
                seq.set_need(Need::Met);
                seq.misses = 0;
                seq.blocks.push_local(&blocks);
                true
            }
            Some(borrow) => {
                seq.set_need(Need::Borrowing(borrow));
                seq.aside = blocks;
                false
            }
        }
    }

    /// A waiting sequence needs others' memory and there is no gManager to ask. What could not run here alone waits for
    /// one until the deadline.
    pub(crate) fn wait_for_gmanager(&mut self, id: SeqId, lending: Lending, needed: u32) {
        let (alone, total) = (lending == Lending::Closed && self.membership.id.is_some(), self.cx.config.blocks_total);
        if alone && needed > total {
            let room = u64::from(total) * u64::from(self.cx.config.block_tokens);
            let message = format!(
                "the request needs more than this instance's {room} tokens of memory, and no gManager was there to \
                 borrow through for {} s",
                GMANAGER_WAIT_MS / 1000
            );
            self.fail(id, RequestError::Unavailable(message));
        } else {
            self.retry_later(id);
        }
    }

    /// Fails what waited for admission too long.
    pub(crate) fn expire_waiting(&mut self) {
        let now = self.cx.now_ms;
        let late =
            |w: &&crate::batch::scheduler::Waiting| self.batch.seqs.get(&w.seq).is_some_and(|s| s.admit_by_ms <= now);
        let late: Vec<SeqId> = self.batch.sched.waiting().filter(late).map(|w| w.seq).take(QUEUE_DEFAULT).collect();
        for seq in late {
            let message = format!("no memory became free within {} s", ADMISSION_DEADLINE_MS / 1000);
            self.fail(seq, RequestError::Unavailable(message));
        }
    }
}
