//! Admission: accepts requests and allocates KV memory for waiting sequences, all or nothing.
//!
//! The newest rBlocks of a prompt stay local so that decoding grows in local memory; the oldest go to creditors, which then attend for
//! all rows, or stay local, too, where that is faster ([`CostModel::prefers_local`]). A sequence that cannot be placed completely waits
//! and holds no memory.

use super::others::PrefillQueries;
use super::policy::{Attempt, Short, Sources};
use super::sequence::{Need, Sequence};
use super::{Batch, policy};
use crate::config::RemotePolicy;
use crate::cost::CostModel;
use crate::cx::Cx;
use crate::outcome::Outcome;
use lagoon_protocol::{Role, TierRequest};
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, GMANAGER_WAIT_MS, QUEUE_DEFAULT};
use lagoon_types::{CONTEXT, GenerateRequest, RequestError, RequestOptions, SeqId};

impl Batch {
    /// Whether this instance's role accepts clients' requests; an error for the client if not.
    fn takes_requests(cx: &Cx) -> Result<(), RequestError> {
        if cx.standing.roles.accepts(cx.now_ms) {
            return Ok(());
        }
        // Clients of one whose role changed ask another one.
        let why = match cx.standing.roles.now() {
            Role::Kv => "this node lends memory only (--role kv)",
            Role::Prefill if cx.config.role == Role::Prefill => {
                "this instance computes prompts for decode workers only (--role prefill)"
            }
            _ => {
                let why = "this instance changes or has changed its role, and takes no requests any more";
                return Err(RequestError::NotServing(why.to_owned()));
            }
        };
        Err(RequestError::Invalid(why.to_owned()))
    }

    pub(crate) fn accept(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        seq: SeqId,
        mut request: GenerateRequest,
    ) -> Result<(), RequestError> {
        Self::takes_requests(cx)?;
        if cx.standing.drained {
            return Err(RequestError::NotServing("this instance was drained and stops".to_owned()));
        }
        let is_embedded = request.options.embedding.is_some();
        if request.prompt.is_empty() || (request.max_tokens == 0) != is_embedded {
            return Err(RequestError::Invalid(
                "a request needs a prompt, and at least one token to generate unless it asks for an embedding"
                    .to_owned(),
            ));
        }
        if let Some(id) = request.prompt.iter().find(|id| **id >= cx.config.vocab) {
            return Err(RequestError::Invalid(format!(
                "token id {id} is not in the vocabulary of {} tokens",
                cx.config.vocab
            )));
        }
        if request.answered as usize >= request.prompt.len() || request.answered >= request.max_tokens.max(1) {
            let GenerateRequest { answered, max_tokens, .. } = request;
            return Err(RequestError::Invalid(format!(
                "an answer of at most {max_tokens} tokens cannot continue after {answered}, or has no prompt"
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
        let (positions, pool) = (u64::from(cx.config.max_positions), cx.pool_tokens());
        if prompt_tokens + u64::from(request.max_tokens) > positions {
            let needed = prompt_tokens + u64::from(request.max_tokens);
            return Err(too_long(needed, positions, CONTEXT));
        }
        // Under a window only the window is held, but memory is taken for the whole prompt: the bound is the same.
        if known_tokens + 1 > pool {
            return Err(too_long(known_tokens + 1, pool, "the KV capacity of the whole pool"));
        }
        // The answer ends (`KvCapacity`) where the pool is full. Under a window that fits the pool it never is.
        let held = cx.config.window.map(|w| u64::from(w) + 2 * u64::from(cx.config.block_tokens));
        let room = u32::try_from(pool - prompt_tokens).unwrap_or(u32::MAX);
        let fills_pool = held.is_none_or(|held| held > pool) && request.max_tokens > room;
        if fills_pool {
            request.max_tokens = room;
        }
        let full = |limit| RequestError::QueueFull { queued: limit, limit };
        // Log-probabilities of a prompt and embeddings are computed where they are reported.
        let RequestOptions { prompt_logprobs, embedding, .. } = &request.options;
        let away = cx.sends_away() && prompt_logprobs.is_none() && embedding.is_none();
        let sequence = Sequence { fills_pool, ..Sequence::new(seq, request, cx.config.block_tokens, cx.now_ms) };
        if !away {
            return self.enqueue(seq, sequence, cx.now_ms).map_err(|queue| full(queue.limit));
        }
        if self.waiting_len(prefills) >= cx.config.sched.queue {
            return Err(full(cx.config.sched.queue));
        }
        self.add(seq, sequence);
        cx.emit(Outcome::SentAway { seq });
        Ok(())
    }

    /// Number of requests that wait for admission or for a prefill worker.
    pub(crate) fn waiting_len(&self, prefills: &dyn PrefillQueries) -> usize {
        self.sched.waiting().len() + prefills.away()
    }

    /// Admits waiting sequences while there is memory.
    pub(crate) fn admit(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        self.admit_in_turn(cx, prefills);
        self.admit_pushed(cx, prefills);
    }

    /// Admits pushed prompts (the decode worker has allocated their memory) that fit in local memory, ahead of a queue
    /// head that needs borrowed memory (maybe the decode worker's) or waits for the oldest waiting pool-sized request.
    fn admit_pushed(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let head = self.sched.next_waiting().and_then(|head| self.seqs.get(&head.seq));
        let lets_pass = |head: &Sequence| {
            let needed = head.blocks.shortfall(head.len() + 1);
            policy::may_overtake(needed, cx.config.blocks_total, Self::gives_way(cx, head.since_ms))
        };
        if !head.is_some_and(lets_pass) {
            return;
        }
        let pushed = self.sched.waiting().map(|w| w.seq).filter(|seq| prefills.is_pushed(*seq));
        let pushed: Vec<SeqId> = pushed.collect();
        for id in pushed {
            let full = policy::free_places(self.sched.running_len(), cx.config.sched.running) == 0;
            let room = self.room(cx) + self.shareable(cx, id);
            let fits = |s: &Sequence| s.blocks.shortfall(s.len()) <= room;
            if !full && self.seqs.get(&id).is_some_and(fits) && self.place(cx, prefills, id) {
                self.admit_placed(cx);
            }
        }
    }

    /// Admits from the head of the queue while there is memory.
    fn admit_in_turn(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        self.admit_placed(cx);
        while let Some(head) = self.sched.next_waiting() {
            let Some(seq) = self.seqs.get(&head.seq) else { return };
            if Self::gives_way(cx, seq.since_ms) {
                return;
            }
            let needed = seq.blocks.shortfall(seq.len() + 1);
            match policy::attempt(seq.need(), cx.now_ms) {
                Attempt::No => return,
                // Memory that has become free ends the pause.
                Attempt::At(at_ms) if needed > self.room(cx) + self.shareable(cx, head.seq) => {
                    self.due.wake_at(at_ms);
                    return;
                }
                Attempt::At(_) | Attempt::Now => {}
            }
            if !self.place(cx, prefills, head.seq) {
                return;
            }
            self.admit_placed(cx);
        }
    }

    /// Admits waiting sequences that have all their memory, wherever they stand in the queue: they would otherwise hold
    /// memory that the head waits for.
    pub(crate) fn admit_placed(&mut self, cx: &Cx) {
        let placed = |s: &SeqId| self.seqs.get(s).is_some_and(|s| s.is_placed() && s.blocks.blocks() > 0);
        let placed: Vec<SeqId> = self.sched.waiting().map(|w| w.seq).filter(placed).collect();
        let places = policy::free_places(self.sched.running_len(), cx.config.sched.running);
        for seq in placed.into_iter().take(places) {
            let micro_batch = self.micro_batch_of(seq);
            let known = self.seqs.get(&seq).map_or(0, |s| s.blocks.written());
            self.start(seq, micro_batch, known, cx.now_ms);
        }
    }

    /// rBlocks kept free for the growth of running sequences.
    pub(crate) fn growth_reserve(&self, cx: &Cx) -> u32 {
        policy::growth_reserve(self.sched.running_len(), cx.config.blocks_total)
    }

    /// Free rBlocks for admission, swap in and blocks that move home: those beyond the growth reserve.
    pub(crate) fn room(&self, cx: &Cx) -> u32 {
        cx.memory.rm.available().saturating_sub(self.growth_reserve(cx))
    }

    /// Whether a request from `since_ms` must wait until the oldest waiting pool-sized request has its memory.
    pub(crate) fn gives_way(cx: &Cx, since_ms: u64) -> bool {
        policy::gives_way(since_ms, cx.standing.oldest_waiting(cx.now_ms), cx.standing.id)
    }

    /// Reports to the rManager the blocks kept for growth, and who waits for memory here and in the pool.
    pub(crate) fn report_waiting(&mut self, cx: &mut Cx) {
        if let Some(until_ms) = cx.standing.oldest_waiting_until_ms(cx.now_ms) {
            self.due.wake_at(until_ms);
        }
        cx.memory.rm.set_growth_reserve(self.growth_reserve(cx));
        let oldest = cx.standing.oldest_waiting(cx.now_ms);
        cx.memory.rm.set_waiting(self.waiting_since_ms(cx), oldest);
    }

    /// Since when the head of the queue waits, in milliseconds; `None` if it needs more memory than this instance has.
    pub(crate) fn waiting_since_ms(&self, cx: &Cx) -> Option<u64> {
        let head = self.seqs.get(&self.sched.next_waiting()?.seq)?;
        let needed = head.blocks.shortfall(head.len() + 1);
        (!policy::is_pool_sized(needed, cx.config.blocks_total)).then_some(head.since_ms)
    }

    /// Allocates memory for a whole waiting sequence. True if it has all; false if it borrows or must retry.
    pub(super) fn place(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&id) else { return false };
        let since_ms = seq.since_ms;
        // One slot more than known tokens: the next token needs one. A prompt for a decode worker needs none, and lies
        // here as a whole.
        let job = seq.for_others.is_some();
        // Blocks of the prompt that the search of the pool did not find have no place either.
        let lost = seq.blocks.lost_block_numbers();
        let new = seq.blocks.shortfall(seq.len() + u32::from(!job));
        let needed = seq.blocks.lost_blocks() + new;
        let end = seq.blocks.blocks() + new;
        // Under a window a sequence may grow longer than the pool; once preempted, it never fits again. It must not
        // hold up the queue for longer than a lost instance may need to come back.
        let capacity = cx.pool_blocks();
        if policy::is_outgrown(needed, capacity, seq.misses) {
            self.fail_outgrown(cx, prefills, id, capacity);
            return false;
        }
        let room = self.room(cx);
        let shareable = if needed <= room { 0 } else { self.shareable(cx, id) };
        let local_first = needed > room && self.is_local_first(cx, id, needed - room);
        let (first, last) = match policy::sources(needed, room, shareable, job, local_first) {
            Sources::Here => (needed, 0),
            Sources::Split { first, last } => (first, last),
            Sources::Retry => {
                self.retry_later(cx, id);
                return false;
            }
        };
        let local = first + last;
        if local < needed && self.waits_for_whole(cx, id) {
            self.retry_later(cx, id);
            return false;
        }
        cx.standing.note_lending_needed(cx.now_ms);
        if local < needed && !self.borrow_or_wait(cx, prefills, id, needed) {
            return false;
        }
        // What several instances computed together, they cache together.
        let together = self.hash_for_members(cx, id).is_some_and(|hashes| self.suits_members(cx, id, hashes));
        if ((local < needed || together) && self.search_pool(cx, id)) || (together && self.asks_members(cx, id)) {
            return false;
        }
        let (known, after) = if local == needed { self.adopt_prefix(cx, id) } else { (0, None) };
        // The block table is built oldest first: own blocks wait aside while those before the newest are borrowed.
        let mut own: Vec<u32> = lost.into_iter().chain(end - new..end).collect();
        own.drain(first as usize..(needed - last) as usize);
        let Some(blocks) = cx.memory.rm.pool.allocate_for(id, own.into_iter().skip(known as usize), after) else {
            self.release_memory(cx, prefills, id);
            self.retry_later(cx, id);
            return false;
        };
        let borrow = (local < needed)
            .then(|| cx.memory.rm.debtor.borrow(id, needed - local, TierRequest::Any, Some(since_ms), cx.now_ms));
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        match borrow {
            None => {
                seq.set_need(Need::Met);
                seq.misses = 0;
                seq.blocks.take_local(&blocks);
                self.begin_load(cx, prefills, id);
                true
            }
            Some(borrow) => {
                seq.set_need(Need::Borrowing(borrow));
                (seq.aside, seq.aside_first) = (blocks, first as usize);
                false
            }
        }
    }

    /// Whether the oldest rBlocks of a waiting sequence that borrows so many are better local. Models with windows always borrow the
    /// oldest: after one window no layer reads them.
    fn is_local_first(&self, cx: &Cx, id: SeqId, borrowed: u32) -> bool {
        if cx.config.window.is_some() || !cx.config.layer_windows.pooled.is_empty() {
            return false;
        }
        // Fetched KV is attended to here wherever it is from.
        let fetches = cx.config.remote == RemotePolicy::Fetch && cx.config.fetch_tokens > 0;
        let rows = self.seqs.get(&id).map_or(0, |seq| seq.len().min(cx.config.sched.step_rows));
        fetches || CostModel::towards(cx, None).prefers_local(rows, borrowed.saturating_mul(cx.config.block_tokens))
    }

    /// True if a waiting sequence of `needed` rBlocks, which must borrow, can. False if no gManager can be asked: it
    /// retries later, or has failed.
    fn borrow_or_wait(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId, needed: u32) -> bool {
        let pool_sized = policy::is_pool_sized(needed, cx.config.blocks_total);
        match policy::admission_short(cx.standing.lending(cx.now_ms), cx.standing.id.is_some(), pool_sized) {
            Short::Borrow => return true,
            Short::Fail => {
                let room = u64::from(cx.config.blocks_total) * u64::from(cx.config.block_tokens);
                let message = format!(
                    "the request needs more than this instance's {room} tokens of memory, and no gManager was there \
                     to borrow through for {} s",
                    GMANAGER_WAIT_MS / 1000
                );
                self.fail(cx, prefills, id, RequestError::Unavailable(message));
            }
            Short::Retry | Short::Preempt => {
                self.drop_found(cx, prefills, id);
                self.retry_later(cx, id);
            }
        }
        false
    }

    /// Fails sequences whose admission deadline has passed.
    pub(crate) fn expire_waiting(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let now = cx.now_ms;
        let late = |w: &&super::scheduler::Waiting| self.seqs.get(&w.seq).is_some_and(|s| s.admit_by_ms <= now);
        let late: Vec<SeqId> = self.sched.waiting().filter(late).map(|w| w.seq).take(QUEUE_DEFAULT).collect();
        for seq in late {
            let message = format!("no memory became free within {} s", ADMISSION_DEADLINE_MS / 1000);
            self.fail(cx, prefills, seq, RequestError::Unavailable(message));
        }
    }
}
