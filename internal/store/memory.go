package store

import "sync"

// A Memory holds what this process knows to have been committed: of each name, the
// largest value of a number that only grows in the database, such as a row's version.
// A row with a smaller number is an earlier row, put back behind the program's back with
// its valid seal. After a restart a Memory knows nothing. It is safe for concurrent use.
//
// A transaction that only reads has a snapshot, and others commit after it was taken.
// Such a transaction that compares its older row with the newest value finds an attack
// where there is none. So a Memory answers each transaction by what was known when that
// began:
//
//	reader:  clock 7, begin ─ snapshot: version 3 ─────────────────────── Newest: 3
//	writer:                     version 4, commit ─ Remember 4 at clock 8
//
// What is known was committed before, and a snapshot has all that was committed before
// it was taken: SQLite takes it when the transaction first reads, PostgreSQL at its
// first statement, and the clock is read before both. So a row of the snapshot that has
// less than what was known has gone back.
//
// A transaction that writes may have waited for its turn, and nobody else has written
// meanwhile what its turn excludes. There all counts that is known by now.
type Memory struct {
	clock *clock
	limit int // of names in each half; 0 means none

	mu       sync.Mutex        // guards what follows
	new, old map[string]*known // when new is full it becomes old, and the former old is dropped
}

// known is a value of a name in a [Memory].
type known struct {
	value  int64
	since  int64  // by the clock; the value was committed before
	before *known // the value until then, for transactions that began earlier; nil if there are none
}

// NewMemory returns an empty Memory for transactions of db. It forgets the names that
// were remembered longest ago when it has more than limit; 0 means never. It keeps at
// most twice as many.
func (db *DB) NewMemory(limit int) *Memory {
	return &Memory{clock: db.clock, limit: limit, new: map[string]*known{}}
}

// Remember makes m know a value of a name once tx, which has read or written it, is
// committed. A smaller value than that which is known is ignored.
func (m *Memory) Remember(tx *Tx, name string, value int64) {
	tx.AfterCommit(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		before := m.findLocked(name)
		if before != nil && before.value >= value {
			return
		}
		now, oldest := m.clock.tick()
		for k := before; k != nil; k = k.before {
			if k.since <= oldest {
				k.before = nil // every open transaction knows k, or what came after
			}
		}
		if m.limit > 0 && len(m.new) >= m.limit {
			m.old, m.new = m.new, map[string]*known{}
		}
		m.new[name] = &known{value: value, since: now, before: before}
	})
}

// Newest returns the largest value of a name with which a row that tx has read may be
// compared, and false if m knows none. Guard is the turn of the transactions that write
// the row.
func (m *Memory) Newest(tx *Tx, guard Turn, name string) (int64, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.findLocked(name)
	// A transaction without a beginning, or of another database, is told the most.
	if tx.begun != 0 && tx.clock == m.clock && !tx.excludes(guard) {
		for k != nil && k.since > tx.begun {
			k = k.before
		}
	}
	if k == nil {
		return 0, false
	}
	return k.value, true
}

func (m *Memory) findLocked(name string) *known {
	if k := m.new[name]; k != nil {
		return k
	}
	return m.old[name]
}

// excludes reports whether no other transaction writes in this turn while tx runs.
func (tx *Tx) excludes(turn Turn) bool {
	if tx.postgres {
		return tx.pg != nil && (tx.turn.Includes(turn) || turn.Includes(tx.turn))
	}
	return tx.writes
}

// Steady reports whether what is written in this turn is the same in all that tx reads: it
// has one snapshot, or nobody else writes it while tx runs. Otherwise two rows that are
// compared may be of two moments.
func (tx *Tx) Steady(turn Turn) bool { return tx.snapshot || tx.excludes(turn) }

// A clock orders the beginnings of transactions and what is learned of their commits.
// It is safe for concurrent use.
type clock struct {
	mu   sync.Mutex    // guards what follows
	now  int64         // how often something was learned, and 1
	open map[int64]int // how many transactions run that began then
}

func newClock() *clock { return &clock{now: 1, open: map[int64]int{}} }

// during calls fn with tx, which begins now. It has run no statement that reads.
func (c *clock) during(tx *Tx, fn func(tx *Tx) error) error {
	c.mu.Lock()
	tx.clock, tx.begun = c, c.now
	c.open[tx.begun]++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.open[tx.begun]--; c.open[tx.begun] == 0 {
			delete(c.open, tx.begun)
		}
	}()
	return fn(tx)
}

// tick returns the time of something new, and the earliest beginning of a transaction
// that runs.
func (c *clock) tick() (now, oldest int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	oldest = c.now
	for begun := range c.open {
		oldest = min(oldest, begun)
	}
	c.now++
	return c.now, oldest
}
