(* The words that rules.v, which is generated from the Go events, is written in.

   A rule is a finite function: from what an event compares (is this the version
   that was shown? does a rule allow it? …) to an answer. An answer is a refusal,
   or a state with a list of changes. What the changes do to an action with
   unbounded numbers is in world.v. *)

(* internal/oversight.State *)
Inductive state :=
  Scheduled | Pending | Denied | Approved | Executing | Done | Failed | Unknown | Cancelled.

(* internal/oversight.PartState *)
Inductive part_state :=
  PQueued | PSending | PDelivered | PDeferred | PBounced | PSuppressed | PUncertain | PCancelled.

(* internal/policy.Effect: what policy says about an action *)
Inductive verdict := Allow | Ask | Deny.

(* Who cancels or revises. *)
Inductive writer :=
  | Reviewer        (* a person who decides *)
  | Looker          (* a person who may only look *)
  | Program         (* the proposer, or another key of the inbox *)
  | OtherSandbox.   (* code in a sandbox that did not propose it *)

(* How many executions began before. *)
Inductive tries := NoTry | OneTry | MoreTries.

(* Why an event is refused: the errors of the package, by name. *)
Inductive refusal :=
  Stale | TooLate | Forbidden | NotAsked | NotCounted | StepUp | Stopped | Invalid | Unseen | Tampered.

Inductive change :=
  | NextVersion    (* the version goes up by one *)
  | Beyond         (* it goes above the row's and above the record's *)
  | NewBytes       (* payload and digest are the proposal's; the payload's digest is this digest *)
  | NewNeed        (* it asks whom the verdict asks *)
  | StricterNeed   (* it asks whom the verdict asks, and at least those whom it asked *)
  | ByNobody       (* its decider is empty *)
  | ByPerson       (* its decider is the person who decides now *)
  | BySystem       (* its decider is the gate *)
  | OneMore        (* one more execution began *)
  | OneLess        (* the last execution does not count *)
  | AtLeastOne     (* it counts as begun *)
  | Halt           (* it notes why no further part may begin *)
  | Deadline       (* a time by which people must decide *)
  | NoDeadline
  | Leased         (* it belongs to one program for a while *)
  | Told.          (* why, or with which result, is written into it *)

Inductive answer :=
  | Refused (why : refusal)   (* the action is as before *)
  | Stays                     (* likewise, and that is no error *)
  | Moves (to : state) (changes : list change).

(* What becomes of one part of an effect, such as one recipient of a message. *)
Inductive part_answer :=
  | PRefused
  | PKeeps
  | PMoves (to : part_state) (asked : bool) (one_more : bool).
