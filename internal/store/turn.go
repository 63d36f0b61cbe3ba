package store

// A Turn says which transactions that write may not run at the same time as one:
//
//	All                     excludes every other
//	Project("p")            excludes every other of project p
//	Thing("p", "ibx_1")     excludes others of this thing of project p, such as an inbox
//	Task("audit sequencer") excludes others of this name; it writes rows of no project
//
// Each also excludes the wider ones: a Thing its Project and All. So transactions that
// exclude one another run one after the other, and each sees what the former ones have
// committed. What a transaction reads in order to decide must not change while it
// runs. So it takes a turn that covers all of it, or changes a row that two such
// transactions share, such as a count, in one conditional statement.
//
// Rows that transactions of different turns share are locked until the end by the
// statement that changes them. Such statements come last, in this order, so that no
// two transactions wait for each other: the counts of the project (package quota),
// the number of an inbox's last event.
//
// SQLite has one writer: there every turn is All. The zero Turn is All.
type Turn struct{ project, thing, task string }

// All returns the turn that excludes every other. It is right for every transaction,
// and blocks all of the installation.
func All() Turn { return Turn{} }

// Project returns the turn of a whole project. An empty id means [All].
func Project(id string) Turn { return Turn{project: id} }

// Thing returns the turn of one thing of a project, by its id: an inbox, or a sandbox.
// An empty id means all of the project, and an empty project [All]: a caller that does
// not know them excludes too much and not too little.
func Thing(project, id string) Turn {
	if project == "" {
		return All()
	}
	return Turn{project: project, thing: id}
}

// Task returns the turn of a task of the server itself, which has no project. An empty
// name means [All].
func Task(name string) Turn { return Turn{task: name} }

// String returns t for logs: "all", "project p", "thing p/ibx_1", "task name".
func (t Turn) String() string {
	switch {
	case t.task != "":
		return "task " + t.task
	case t.thing != "":
		return "thing " + t.project + "/" + t.thing
	case t.project != "":
		return "project " + t.project
	}
	return "all"
}

// Covers reports whether t may write rows of a project; an empty one means rows of
// none.
func (t Turn) Covers(project string) bool { return t == All() || t.project == project }

// Includes reports whether t excludes all that other excludes.
func (t Turn) Includes(other Turn) bool {
	return t == All() || t == other || t.project != "" && t.thing == "" && t.project == other.project
}

// Turn returns the turn that tx has. That of [DB.View] covers no project.
func (tx *Tx) Turn() Turn { return tx.turn }

// The statements that take a turn, on PostgreSQL. [All] locks the table migration
// against everybody, as releases before turns did in every transaction. The others
// lock it as a statement does that deletes from it, which excludes All and not one
// another. PostgreSQL takes locks of tables before the statement runs, so the order
// is: all, project, thing. Reads are not blocked.
//
// Advisory locks end with the transaction. The schema is part of their names, since
// several installations may be schemas of one database. Two names with the same hash
// of 64 bits would only wait for each other.
const (
	takeAll     = `lock table migration in share row exclusive mode`
	takeProject = `with shared as (delete from migration where false)
		select pg_advisory_xact_lock(hashtextextended(current_schema() || ' turn project ' || $1, 0))`
	takeThing = `with shared as (delete from migration where false), project as materialized
			(select pg_advisory_xact_lock_shared(hashtextextended(current_schema() || ' turn project ' || $1, 0)))
		select pg_advisory_xact_lock(hashtextextended(current_schema() || ' turn thing ' || $2, 0)) from (select count(*) from project) as first`
	takeTask = `with shared as (delete from migration where false)
		select pg_advisory_xact_lock(hashtextextended(current_schema() || ' turn task ' || $1, 0))`
)

// statement returns the statement that waits for t. What is read after it includes
// what former turns have committed.
func (t Turn) statement() (query string, args []any) {
	switch {
	case t.task != "":
		return takeTask, []any{t.task}
	case t.thing != "":
		return takeThing, []any{t.project, t.thing}
	case t.project != "":
		return takeProject, []any{t.project}
	}
	return takeAll, nil
}
