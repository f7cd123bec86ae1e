"""What the record of a run says, when it has ended or while it runs: report, comparison and plan."""
