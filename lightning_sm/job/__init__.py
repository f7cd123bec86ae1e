"""The facts of a job that SageMaker states, and the rules that follow from them."""
